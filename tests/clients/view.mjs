// A host of MCP Apps: the server over stdio, its view in a frame of a real browser, driven by a person's hand.
// node view.mjs CHROMIUM SHOTS SERVER ARGUMENT…; prints what was seen as JSON.
import { Client } from "@modelcontextprotocol/client";
import { StdioClientTransport } from "@modelcontextprotocol/client/stdio";
import { build } from "esbuild";
import { chromium } from "playwright-core";
import { createServer } from "node:http";

const [executablePath, shots, command, ...args] = process.argv.slice(2);
const HOST = `
import { AppBridge, PostMessageTransport } from "@modelcontextprotocol/ext-apps/app-bridge";
window.open_view = async (html, result, theme) => {
  const frame = document.createElement("iframe");
  frame.setAttribute("sandbox", "allow-scripts");
  frame.style.width = "700px";
  frame.style.height = "700px";
  document.body.replaceChildren(frame);
  window.sizes = [];
  const bridge = window.bridge = new AppBridge(null, { name: "host", version: "1" }, { serverTools: {} }, { hostContext: { theme } });
  bridge.oncalltool = params => window.call_tool(params);
  bridge.onsizechange = size => window.sizes.push(size);
  const ready = new Promise(resolve => { bridge.oninitialized = resolve; });
  const transport = new PostMessageTransport(frame.contentWindow, frame.contentWindow);
  await bridge.connect(transport);
  frame.srcdoc = html;
  await ready;
  await bridge.sendToolInput({ arguments: {} });
  await bridge.sendToolResult(result);
};
`;
const bundle = await build({ stdin: { contents: HOST, resolveDir: process.cwd() }, bundle: true, write: false, format: "iife", platform: "browser" });
const site = createServer((request, response) => {
  response.setHeader("content-type", "text/html");
  response.end(`<!doctype html><body><script>${bundle.outputFiles[0].text.replaceAll("</script", "<\\/script")}</script></body>`);
});
await new Promise(resolve => site.listen(0, "127.0.0.1", resolve));
const address = `http://127.0.0.1:${site.address().port}/`;

const client = new Client({ name: "host", version: "1" });
await client.connect(new StdioClientTransport({ command, args, env: process.env, stderr: "ignore" }));
const call = (name, given = {}, _meta = undefined) => client.callTool({ name, arguments: given, _meta }, { timeout: 180_000 });
const tools = (await client.listTools()).tools;
const uri = tools.find(each => each.name === "show")._meta.ui.resourceUri;
const html = (await client.readResource({ uri })).contents[0].text;

const browser = await chromium.launch({ executablePath, args: ["--no-sandbox"] });
const page = await browser.newPage({ viewport: { width: 740, height: 760 } });
const seen = { errors: [], requests: [], dialogs: 0 };
page.on("pageerror", error => seen.errors.push(String(error)));
page.on("console", message => message.type() === "error" && seen.errors.push(message.text()));
page.on("request", request => { if (request.url() !== address && !request.url().startsWith("data:") && !request.url().startsWith("about:")) seen.requests.push(request.url()); });
page.on("dialog", dialog => { seen.dialogs++; dialog.dismiss(); });
await page.exposeFunction("call_tool", params => call(params.name, params.arguments, params._meta));
await page.goto(address);
const view = () => page.frames().at(-1);
const open = async (code, theme = "light", wait = undefined) => {
  await call("execute", wait === undefined ? { code } : { code, wait });
  const result = await call("show");
  await page.evaluate(([html, result, theme]) => window.open_view(html, result, theme), [html, result, theme]);
  await view().waitForFunction(() => document.getElementById("main").children.length > 0 || !document.getElementById("stop").hidden);
};

// tables: sorted and filtered, by mouse and by keyboard
await open("import pandas as pd\npd.DataFrame({'n': [10, 9, 2], 'name': ['x', 'y', 'zeta']})");
const column = place => view().$$eval(`tbody tr td:nth-child(${place})`, cells => cells.map(each => each.textContent));
seen.table = await column(2);
await view().click("thead button:has-text('n')");
seen.sorted = await column(2);
await view().focus("thead th:nth-child(2) button");
await page.keyboard.press("Enter");
seen.reversed = await column(2);
seen.aria = await view().getAttribute("thead th:nth-child(2)", "aria-sort");
await view().fill("input", "ZETA");
seen.filtered = await column(3);
await page.screenshot({ path: `${shots}/table.png` });

// charts and pictures, dark
await open("import matplotlib.pyplot as plt\nplt.plot([1, 4, 9], label='a'); plt.plot([2, 3, 4], label='b'); plt.title('Lines'); plt.show()\nplt.bar(['p', 'q'], [3, -1]); plt.show()\nplt.pie([1, 2]); plt.show()", "dark");
seen.charts = await view().$$eval("svg", all => all.map(each => each.getAttribute("aria-label")));
seen.lines = await view().$$eval("svg polyline", all => all.length);
seen.bars = await view().$$eval("svg rect", all => all.length);
seen.pictures = await view().$$eval("img", all => all.map(each => each.naturalWidth > 0));
seen.background = await view().evaluate(() => getComputedStyle(document.body).backgroundColor);
await page.screenshot({ path: `${shots}/charts.png` });

// what cannot be drawn as it is in the figure is its picture
await open("plt.semilogy([1, 10, 100]); plt.show()\nplt.plot(['a 1', 'b 2'], [1, 2]); plt.show()\npd.DataFrame({'a': [1, 2], 'b': [3, 4]}).plot.bar(stacked=True); plt.show()\nplt.plot(pd.date_range('2024-01-01', periods=5), range(5)); plt.show()");
seen.undrawn = await view().$$eval("img", all => all.length);
seen.days = await view().$$eval("svg text", all => all.map(each => each.textContent).filter(each => each.includes("-")));
await page.screenshot({ path: `${shots}/pictures.png` });

// JSON and text
await open("from IPython.display import JSON, display\nprint('text'); display({'application/json': {'a': [1, {'b': None}]}}, raw=True)\n1/0");
seen.json = await view().$$eval("details:not(.trace)", all => all.length);
seen.folded = await view().$$eval("details.trace", all => all.map(each => [each.open, each.querySelector("summary").textContent]));
seen.texts = await view().$$eval("pre", all => all.map(each => [each.className, each.textContent.slice(0, 40)]));
await page.screenshot({ path: `${shots}/json.png` });

// a running cell is followed and stopped; what a person does with its outputs meanwhile stays
await open("import time\ndisplay(pd.DataFrame({'n': [1, 2]}))\nfor i in range(1000): print('step', i); time.sleep(0.1)", "light", 0);
await view().waitForFunction(() => document.body.textContent.includes("step 5"), null, { timeout: 60_000 });
seen.running = await view().textContent("#state");
await view().fill("input", "2");
const step = await view().evaluate(() => document.body.textContent.match(/step \d+/g).length);
await view().waitForFunction(before => document.body.textContent.match(/step \d+/g).length > before + 5, step, { timeout: 60_000 });
seen.kept = await view().evaluate(() => [document.querySelector("input").value, document.activeElement.tagName]);
await page.screenshot({ path: `${shots}/running.png` });
await view().focus("#stop");
await page.keyboard.press("Enter");
await view().waitForFunction(() => document.getElementById("state").textContent.includes("interrupted"), null, { timeout: 60_000 });
seen.stopped = await view().textContent("#state");
seen.hidden = await view().evaluate(() => document.getElementById("stop").hidden);
seen.focused = await view().evaluate(() => document.activeElement.id);
seen.told = (await call("execute", { code: "1" })).content.map(each => each.text);

// a session that is closed is not followed any more
await open("time.sleep(600)", "light", 0);
const [{ session }] = (await call("list_sessions")).structuredContent.sessions;
await call("close_session", { session });
await view().waitForFunction(() => document.getElementById("stop").hidden, null, { timeout: 60_000 });
seen.gone = await view().textContent("#state");

// hostile outputs: nothing runs, nothing leaves
const evil = "<script>alert(1)</script><img src=x onerror=alert(1)><iframe src=javascript:alert(1)></iframe><a href=javascript:alert(1)>x</a><form action=http://127.0.0.1:1><style>body{background:url(http://127.0.0.1:1/s)}</style>";
await open(`from IPython.display import display, HTML
evil = ${JSON.stringify(evil)}
display(HTML(evil)); display({"text/html": "<table><thead><tr><th>" + evil + "</th></tr></thead><tbody><tr><td>" + evil + "</td></tr></tbody></table>", "text/plain": evil}, raw=True)
display({"image/png": "AAAA\\" onerror=\\"alert(1)", "text/plain": evil}, raw=True)
display({"image/svg+xml": "<svg onload='alert(1)'><script>alert(1)</script></svg>", "text/plain": evil}, raw=True)
display({"application/vnd.kernel-mcp.chart+json": {"type": "bar", "title": evil, "elements": [{"label": evil, "value": 1}, {"label": "x", "value": "nan"}]}, "text/plain": evil}, raw=True)
display({"application/vnd.kernel-mcp.chart+json": {"type": "line", "elements": [{"label": evil, "points": [[1, 2], ["x", None], 5, None]}]}, "text/plain": "malformed"}, raw=True)
display({"application/json": {evil: evil, "__proto__": {"x": 1}}}, raw=True)
print(evil)`);
await view().waitForTimeout(500);
seen.foreign = await view().evaluate(() => document.querySelectorAll("script, iframe, form, a, [onerror], [onload], style").length);
seen.frames = page.frames().length;
await page.screenshot({ path: `${shots}/hostile.png` });
seen.sizes = await page.evaluate(() => window.sizes.length);
await browser.close();
await client.close();
site.close();
console.log(JSON.stringify(seen));

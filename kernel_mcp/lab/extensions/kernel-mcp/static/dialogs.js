// Says why a session is not restarted, wherever JupyterLab offers that: its own page would say
// nothing, and go on with what follows a restart, such as running all cells.
(() => {
  const RESTART =
    "The kernel was not restarted, and nothing was run or cleared: an agent works in this session, " +
    "too. The session is started, reset and ended by its agent and its server. To have it start " +
    "afresh ask the agent for reset.";
  let shared;

  async function load(name) {
    const [provided] = Object.values(shared[name]);
    return (await provided.get())();
  }

  async function dialogs() {
    const { Dialog, ISessionContextDialogs, SessionContextDialogs, showDialog } = await load(
      "@jupyterlab/apputils",
    );
    class Dialogs extends SessionContextDialogs {
      async restart() {
        const buttons = [Dialog.okButton()];
        await showDialog({ title: "A session is not restarted here", body: RESTART, buttons });
        return false;
      }
    }
    return {
      id: "kernel-mcp:dialogs",
      description: "Dialogs about the kernels of sessions.",
      provides: ISessionContextDialogs,
      activate: () => new Dialogs(),
    };
  }

  // What webpack's containers are to the page that loads them.
  window._JUPYTERLAB = window._JUPYTERLAB ?? {};
  window._JUPYTERLAB["kernel-mcp"] = {
    init: (scope) => {
      shared = scope;
    },
    get: async () => {
      const plugin = await dialogs();
      return () => plugin;
    },
  };
})();

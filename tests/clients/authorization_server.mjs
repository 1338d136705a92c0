// An authorization server on loopback: prints its issuer once it listens, and the resource of each
// token is the one that its client asked for. The clients `RS256` and so on have tokens signed so.
import { createServer } from "node:http";
import { exportJWK, generateKeyPair } from "jose";
import Provider from "oidc-provider";

const ALGORITHMS = ["RS256", "PS256", "ES256", "EdDSA"];
const SCOPES = "kernel:run kernel:install kernel:metrics";

const keys = [];
for (const alg of ALGORITHMS) {
  const { privateKey } = await generateKeyPair(alg, { extractable: true });
  keys.push({ ...(await exportJWK(privateKey)), alg, kid: `key-${alg}`, use: "sig" });
}

const machines = [...ALGORITHMS, "opaque", "expired"].map((name) => ({
  client_id: name,
  client_secret: `secret-of-${name}`,
  grant_types: ["client_credentials"],
  redirect_uris: [],
  response_types: [],
}));

const app = {
  client_id: "app",
  token_endpoint_auth_method: "none",
  redirect_uris: ["http://127.0.0.1:9/callback"],
};

const server = createServer();
server.listen(0, "127.0.0.1", () => {
  const issuer = `http://127.0.0.1:${server.address().port}`;
  const provider = new Provider(issuer, {
    clients: [...machines, app],
    jwks: { keys },
    scopes: ["openid", "offline_access", ...SCOPES.split(" ")],
    findAccount: (_, id) => ({ accountId: id, claims: () => ({ sub: id }) }),
    formats: {
      customizers: {
        jwt: (_, token, jwt) => {
          if (token.clientId === "expired") jwt.payload.exp = jwt.payload.iat - 60;
        },
      },
    },
    pkce: { required: () => true },
    features: {
      clientCredentials: { enabled: true },
      devInteractions: { enabled: true },
      registration: { enabled: true },
      resourceIndicators: {
        enabled: true,
        useGrantedResource: () => true,
        getResourceServerInfo: (_, resource, client) => ({
          audience: resource,
          scope: SCOPES,
          accessTokenTTL: 600,
          accessTokenFormat: client.clientId === "opaque" ? "opaque" : "jwt",
          jwt: { sign: { alg: ALGORITHMS.includes(client.clientId) ? client.clientId : "RS256" } },
        }),
      },
    },
  });
  server.on("request", provider.callback());
  console.log(issuer);
});
process.stdin.on("end", () => process.exit(0)).resume();

// Reads from the server. Every call is a GET of the page's own origin.

export class ServerError extends Error {}

export async function get(path, parameters = {}, signal = undefined) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters)) {
    if (value !== null && value !== undefined && value !== "") query.set(name, value);
  }
  let answer;
  try {
    answer = await fetch(`/api/${path}${query.size ? `?${query}` : ""}`, { signal, credentials: "same-origin" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The server does not answer. Is `stretto ui` still running?");
  }
  if (answer.ok) return answer.json();
  const type = answer.headers.get("Content-Type") ?? "";
  const text = type.startsWith("application/json") ? (await answer.json()).error : await answer.text();
  throw new ServerError(text);
}

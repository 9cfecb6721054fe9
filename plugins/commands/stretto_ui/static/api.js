// Reads from the server: every call is a GET of the page's own origin. In a file of `stretto report` there is no server.

export class ServerError extends Error {}

/** In such a file: path and parameters -> answer, and when it was written. Otherwise null. What needs a server has the class `asks`. */
export const saved = JSON.parse(document.getElementById("saved")?.textContent ?? "null");

/** Parameters that choose a part of what the file holds whole. */
const PARTS = ["points", "start", "end", "keys", "smoothing", "width"];

function addressOf(path, parameters) {
  const query = new URLSearchParams(Object.entries(parameters).filter(([name, value]) => value !== null && value !== undefined && value !== "" && !(saved && PARTS.includes(name))));
  query.sort();
  return query.size ? `${path}?${query}` : path;
}

export const imageAddress = (path, parameters) => (saved ? (saved[addressOf(path, parameters)]?.address ?? "data:,") : `/api/${addressOf(path, parameters)}`);

export async function get(path, parameters = {}, signal = undefined) {
  const address = addressOf(path, parameters);
  if (saved) {
    const found = address in saved ? saved[address] : { error: "This file does not hold this part of a run: `stretto ui` shows it." };
    if (found?.error) throw new ServerError(found.error);
    return found;
  }
  let answer;
  try {
    answer = await fetch(`/api/${address}`, { signal, credentials: "same-origin" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The server does not answer. Is `stretto ui` still running?");
  }
  if (answer.ok) return answer.json();
  const type = answer.headers.get("Content-Type") ?? "";
  const text = type.startsWith("application/json") ? (await answer.json()).error : await answer.text();
  throw new ServerError(text);
}

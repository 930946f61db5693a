// The server's API: models, statistics, streamed answers. Every failure is an ApiError with a sentence for people.

const KEY = "roofline-api-key"; // in sessionStorage: it goes with the tab

export class ApiError extends Error {
  /** kind: key, overloaded, server, connection; retryAfter: seconds, where the server said some. */
  constructor(kind, message, { status = 0, retryAfter = null } = {}) {
    super(message);
    Object.assign(this, { kind, status, retryAfter });
  }
}

export const key = {
  get: () => sessionStorage.getItem(KEY),
  set: (value) => sessionStorage.setItem(KEY, value),
  forget: () => sessionStorage.removeItem(KEY),
};

const LOST = "The connection to the server was lost";

async function request(path, options = {}) {
  const headers = { ...options.headers };
  if (key.get()) headers.Authorization = `Bearer ${key.get()}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers, cache: "no-store", credentials: "omit" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    if (error instanceof TypeError && headers.Authorization && !/^[\x20-\x7e]*$/.test(headers.Authorization)) {
      throw new ApiError("key", "An API key has ASCII characters only.", { status: 401 });
    }
    throw new ApiError("connection", "The server cannot be reached. Is it running?");
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

/** The server's own sentence about a refused request. */
async function refusal(response) {
  const { status } = response;
  let message = "";
  try {
    message = (await response.json()).error.message;
  } catch {
    // Not our server's form: a proxy, perhaps.
  }
  if (typeof message !== "string" || !message) message = `The server answered with status ${status}.`;
  const kind = status === 401 ? "key" : status === 429 ? "overloaded" : "server";
  const seconds = Number.parseInt(response.headers.get("Retry-After") ?? "", 10);
  return new ApiError(kind, message, { status, retryAfter: Number.isFinite(seconds) ? seconds : null });
}

async function object(path, signal) {
  const response = await request(path, { signal });
  try {
    return await response.json();
  } catch {
    throw new ApiError("server", `What the server sent for ${path} is not JSON.`);
  }
}

/** [{id, max_model_len, ...}] */
export async function models() {
  const { data } = await object("/v1/models");
  if (!Array.isArray(data)) throw new ApiError("server", "The server's list of models cannot be read.");
  return data;
}

export const stats = (signal) => object("/stats", signal);

/**
 * The events of a streamed answer: {thoughts}, {text}, {reason}, {usage}. Throws an ApiError; of kind "connection" when the stream
 * ends before its [DONE].
 */
export async function* chat(body, signal) {
  const response = await request("/v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    let chunk;
    try {
      chunk = JSON.parse(data);
    } catch {
      throw new ApiError("server", "The server sent an event that is not JSON.");
    }
    if (chunk.error) throw new ApiError("server", String(chunk.error.message));
    const choice = chunk.choices?.[0];
    if (choice?.delta?.reasoning_content) yield { thoughts: choice.delta.reasoning_content };
    if (choice?.delta?.content) yield { text: choice.delta.content };
    if (choice?.finish_reason) yield { reason: choice.finish_reason };
    if (chunk.usage) yield { usage: chunk.usage };
  }
  throw new ApiError("connection", `${LOST} before the answer was complete.`);
}

/** The data of server-sent events, one string each. */
export async function* events(stream) {
  const reader = stream.getReader();
  const decoder = new TextDecoder();
  let buffer = "";
  try {
    for (;;) {
      let part;
      try {
        part = await reader.read();
      } catch (error) {
        if (error.name === "AbortError") throw error;
        throw new ApiError("connection", `${LOST} in the middle of the answer.`);
      }
      if (part.done) return;
      buffer += decoder.decode(part.value, { stream: true });
      const lines = buffer.split("\n");
      buffer = lines.pop();
      for (const line of lines) {
        if (line.startsWith("data:")) yield line.slice(5).trim();
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

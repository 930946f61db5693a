// One answer while it is computed: streams into its message, and measures it.

import { ApiError, chat } from "./api.js";
import { messagesFor } from "./tree.js";

export class Answer {
  /** node: the assistant's message to write into. changed: called after each event. */
  constructor(conversation, node, model, changed) {
    Object.assign(this, { conversation, node, model, changed });
    this.controller = new AbortController();
  }

  stop() {
    this.controller.abort();
  }

  /** Runs to the end. Never throws an ApiError: the message has it. Returns the error, if there was one. */
  async run() {
    const { conversation, node } = this;
    const body = { model: this.model, messages: messagesFor(conversation, node.parent), ...conversation.sampling };
    const started = performance.now();
    let first = null;
    let last = null;
    try {
      for await (const event of chat(body, this.controller.signal)) {
        if (event.text || event.thoughts) {
          last = performance.now();
          first ??= last;
          node.text += event.text ?? "";
          node.thoughts += event.thoughts ?? "";
          node.firstToken = (first - started) / 1000;
        }
        if (event.reason) node.reason = event.reason;
        if (event.usage) node.usage = pickUsage(event.usage);
        this.changed(node);
      }
      node.status = "complete";
    } catch (error) {
      if (this.controller.signal.aborted) {
        node.status = "stopped";
      } else {
        if (!(error instanceof ApiError)) throw error;
        node.status = "failed";
        node.error = { kind: error.kind, message: error.message, retryAfter: error.retryAfter };
        return error;
      }
    } finally {
      if (node.status === "running") node.status = "failed";
      if (node.usage?.completion > 1 && last > first) {
        node.speed = (node.usage.completion - 1) / ((last - first) / 1000); // tokens a second after the first
      }
      this.changed(node);
    }
    return null;
  }
}

const pickUsage = (usage) => ({
  prompt: usage.prompt_tokens,
  completion: usage.completion_tokens,
  cached: usage.prompt_tokens_details?.cached_tokens ?? 0,
});

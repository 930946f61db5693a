// What a reader does with conversations: send, stop, answer again, edit, choose a branch. Holds the open conversation
// and the answers that run, in this and in other conversations.

import { Answer } from "./answer.js";
import { add, choose, newConversation, nodeOf, path } from "./tree.js";

const SAVE_EVERY = 2000; // milliseconds while an answer runs

export class Chat {
  /** store: see store.js. hooks: shown(), changed(node), measured(node), needsKey() -> whether there is one now. */
  constructor(store, hooks) {
    Object.assign(this, { store, hooks, model: null, conversation: newConversation() });
    this.running = new Map(); // id of a conversation -> its Answer
  }

  get busy() {
    return this.running.has(this.conversation.id);
  }

  start(defaults) {
    this.conversation = newConversation(defaults);
    this.hooks.shown();
  }

  async open(id) {
    const conversation = this.running.get(id)?.conversation ?? (await this.store.get(id));
    if (!conversation) return false;
    this.conversation = conversation;
    this.hooks.shown();
    return true;
  }

  /** False when nothing was sent, as while an answer runs. */
  send(text, attachments) {
    if (this.busy || !this.model) return false;
    const parent = path(this.conversation).at(-1)?.id ?? null;
    const node = add(this.conversation, parent, { role: "user", text, attachments });
    this.answer(node);
    return true;
  }

  /** An edited message is a branch beside the first one. */
  edit(node, text) {
    if (this.busy) return;
    const { attachments, parent } = node;
    this.answer(add(this.conversation, parent, { role: "user", text, attachments }));
  }

  /** Another answer to the same message. */
  again(node) {
    const question = nodeOf(this.conversation, node.parent);
    if (!this.busy && question) this.answer(question);
  }

  /** After an error: in place of the failed answer where it has no text, else beside it. */
  retry(node) {
    if (this.busy) return;
    if (node.text) this.again(node);
    else this.run(this.conversation, node);
  }

  choose(node) {
    choose(this.conversation, node);
    this.hooks.shown();
    this.save(this.conversation);
  }

  stop() {
    this.running.get(this.conversation.id)?.stop();
  }

  answer(question) {
    this.run(this.conversation, add(this.conversation, question.id, { role: "assistant", text: "" }));
  }

  async run(conversation, node) {
    Object.assign(node, { text: "", thoughts: "", status: "running", error: null, reason: null, usage: null, speed: null,
      firstToken: null, model: this.model });
    let saved = performance.now();
    const answer = new Answer(conversation, node, this.model, () => {
      if (conversation === this.conversation) this.hooks.changed(node);
      if (performance.now() - saved > SAVE_EVERY) {
        saved = performance.now();
        this.save(conversation);
      }
    });
    this.running.set(conversation.id, answer);
    this.save(conversation);
    this.hooks.shown();
    const error = await answer.run();
    this.running.delete(conversation.id);
    this.save(conversation);
    if (conversation === this.conversation) this.hooks.shown();
    this.hooks.measured(node);
    if (error?.kind === "key" && !this.running.has(conversation.id) && (await this.hooks.needsKey(error.message))) {
      this.run(conversation, node);
    }
  }

  save(conversation) {
    if (conversation.deleted) return;
    conversation.updated = Date.now();
    this.store.put(conversation);
  }

  async remove(id) {
    const answer = this.running.get(id);
    const conversation = answer?.conversation ?? (await this.store.get(id));
    answer?.stop();
    if (conversation) conversation.deleted = true;
    await this.store.remove(id);
    return conversation;
  }

  async restore(conversation) {
    delete conversation.deleted;
    await this.store.put(conversation);
  }
}

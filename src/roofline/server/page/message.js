// One message of the shown branch: its text, what can be done with it, how it went.

import { announce, copyFrom, element, icon, iconButton } from "./dom.js";
import { View } from "./render.js";
import { contentOf } from "./tree.js";

export class MessageView {
  /** actions: edit(node, text), again(node), choose(node): what the buttons do. */
  constructor(node, actions) {
    this.node = node;
    this.actions = actions;
    this.body = element("div", { class: node.role === "user" ? "bubble" : "prose" });
    this.foot = element("div", { class: "foot" });
    this.notice = element("div");
    this.thoughts = node.role === "user" ? null : element("details", { class: "thoughts", hidden: true },
      element("summary"), element("div", { class: "plain" }));
    const name = node.role === "user" ? "You" : "Answer";
    this.element = element("article", { class: `message ${node.role}`, "data-id": node.id },
      element("h2", { class: "off-screen" }, name), this.thoughts, this.body, this.notice, this.foot);
    if (node.role === "assistant") this.view = new View(this.body);
    this.announced = 0; // blocks that screen readers were told
  }

  /** place: {index, count, previous, next} among the branches; busy: an answer is being computed. */
  update(place, busy) {
    const { node } = this;
    const running = node.status === "running";
    this.element.classList.toggle("running", running);
    this.element.setAttribute("aria-busy", String(running));
    if (node.role === "assistant") {
      this.showThoughts(running);
      this.view.update(node.text, running);
      this.body.classList.toggle("waiting", running && !node.text);
      if (running || this.wasRunning) this.tell(running);
      this.wasRunning = running;
    } else if (!this.editing) this.showText();
    this.showNotice();
    const state = JSON.stringify([place.index, place.count, busy, node.status, node.usage, node.speed, node.firstToken]);
    if (state !== this.state && !(running && this.state)) this.showFoot(place, busy);
    this.state = running ? this.state ?? state : state;
  }

  /** Has screen readers say each block once it is complete, not each token. */
  tell(running) {
    const complete = running ? this.view.growing.done.length : this.view.shown.length;
    for (; this.announced < complete; this.announced += 1) {
      const { node: block } = this.view.shown[this.announced];
      announce(block.classList.contains("code") ? "A block of code." : block.innerText);
    }
    if (!running) announce(this.node.status === "complete" ? "The answer is complete." : "The answer ended early.");
  }

  /** What the model thought before it answered: closed until somebody opens it, and not sent back. */
  showThoughts(running) {
    const { thoughts, text } = this.node;
    this.thoughts.hidden = !thoughts;
    if (!thoughts) return;
    const [summary, plain] = this.thoughts.children;
    const label = running && !text ? "Thinking…" : "Thoughts";
    if (summary.textContent !== label) summary.textContent = label;
    if (plain.textContent !== thoughts) plain.textContent = thoughts;
  }

  showText() {
    const files = this.node.attachments.map((file) => attachment(file));
    this.body.replaceChildren(...files, ...(this.node.text ? [element("div", { class: "plain" }, this.node.text)] : []));
  }

  showNotice() {
    const { node } = this;
    const sentence = noticeOf(node);
    if (sentence === this.sentence) return;
    this.sentence = sentence;
    if (!sentence) return this.notice.replaceChildren();
    const failed = node.status === "failed";
    this.notice.replaceChildren(element("div", { class: failed ? "notice failed" : "notice", role: failed ? "alert" : null },
      element("p", {}, sentence),
      failed && element("button", { type: "button", class: "button", click: () => this.actions.retry(node) }, "Try again")));
  }

  showFoot(place, busy) {
    const { node, actions } = this;
    const parts = [];
    if (place.count > 1) parts.push(this.branches(place, busy));
    if (node.status !== "running") {
      const what = node.role === "user" ? "message" : "answer";
      const copy = iconButton("copy", `Copy this ${what}`,
        () => copyFrom(copy, node.role === "user" ? contentOf(node) : node.text));
      parts.push(copy);
      if (node.role === "user") {
        parts.push(iconButton("edit", "Edit this message", () => this.edit(), { disabled: busy }));
      } else {
        parts.push(iconButton("again", "Answer again", () => actions.again(node), { disabled: busy }));
      }
      if (node.role === "assistant") parts.push(element("span", { class: "figures" }, figures(node)));
    }
    const focused = this.foot.contains(document.activeElement) && document.activeElement.getAttribute("aria-label");
    this.foot.replaceChildren(...parts);
    if (focused) this.foot.querySelector(`[aria-label="${CSS.escape(focused)}"]`)?.focus();
  }

  branches({ index, count, previous, next }, busy) {
    const step = (name, label, target) =>
      iconButton(name, label, () => this.actions.choose(target, label), { disabled: busy || !target });
    return element("span", { class: "branches", role: "group", "aria-label": `Version ${index + 1} of ${count}` },
      step("left", "Previous version", previous),
      element("span", { "aria-hidden": "true" }, `${index + 1}/${count}`),
      step("right", "Next version", next));
  }

  /** Puts a field in place of the text; what is sent from it is a branch of its own. */
  edit() {
    const { node } = this;
    if (this.editing) return;
    this.editing = true;
    const area = element("textarea", { "aria-label": "Edited message", rows: "3", keydown: (event) => {
      if (event.key === "Escape") {
        event.stopPropagation();
        done(false);
      } else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        done(true);
      }
    } });
    area.value = node.text;
    const done = (send) => {
      const text = area.value.trim();
      if (send && !text && !node.attachments.length) return;
      this.editing = false;
      this.element.classList.remove("editing");
      this.showText();
      if (send) this.actions.edit(node, text);
      else this.foot.querySelector('[aria-label="Edit this message"]')?.focus();
    };
    this.element.classList.add("editing");
    this.body.replaceChildren(...node.attachments.map((file) => attachment(file)), area,
      element("div", { class: "row end" },
        element("button", { type: "button", class: "button", click: () => done(false) }, "Cancel"),
        element("button", { type: "button", class: "button main", click: () => done(true) }, "Send")));
    area.focus();
    area.setSelectionRange(area.value.length, area.value.length);
  }
}

/** A file that goes with a message; it opens to show its text. */
function attachment({ name, text }) {
  return element("details", { class: "attachment" },
    element("summary", {}, icon("file"), element("span", {}, name), element("small", {}, size(text))),
    element("pre", { tabindex: "0", role: "region", "aria-label": `Text of ${name}` }, text));
}

export function size(text) {
  const bytes = new TextEncoder().encode(text).length;
  return bytes < 1024 ? `${bytes} B` : `${(bytes / 1024).toFixed(bytes < 10240 ? 1 : 0)} KB`;
}

function noticeOf(node) {
  if (node.status === "stopped") return "You stopped this answer.";
  if (node.status === "failed") {
    const { kind, message, retryAfter } = node.error ?? { message: "This answer was not completed: the page was left." };
    const wait = retryAfter ? ` It asks to try again in ${retryAfter} ${retryAfter === 1 ? "second" : "seconds"}.` : "";
    return `${kind === "overloaded" ? "The server is busy: " : ""}${message}${wait}`;
  }
  if (node.reason === "length") return "The answer ends here because it has as many tokens as it may have.";
  return "";
}

function figures(node) {
  const parts = [];
  if (node.usage) parts.push(`${node.usage.completion.toLocaleString("en")} tokens`);
  if (node.speed) parts.push(`${figure(node.speed)} tokens/s`);
  if (node.firstToken) parts.push(`first after ${seconds(node.firstToken)}`);
  return parts.join(" · ");
}

export const figure = (value) => (value >= 100 ? Math.round(value).toLocaleString("en") : value.toPrecision(3));

export const seconds = (value) => (value < 1 ? `${Math.round(value * 1000)} ms` : `${value.toFixed(1)} s`);

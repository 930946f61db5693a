// The shown branch of a conversation. It follows the end of an answer for as long as the reader is there.

import { byId, element } from "./dom.js";
import { MessageView } from "./message.js";
import { path, siblings } from "./tree.js";

const NEAR = 80; // pixels from the end that still count as the end

export class Thread {
  constructor(actions) {
    this.actions = actions;
    this.scroller = byId("scroller");
    this.list = byId("messages");
    this.views = new Map();
    this.following = true;
    this.top = 0; // where it was scrolled to last
    this.jump = byId("jump");
    this.scroller.addEventListener("scroll", () => this.scrolled());
    this.jump.addEventListener("click", () => this.toEnd());
    new ResizeObserver(() => this.follow()).observe(this.list);
  }

  /** Shows a conversation; of the same one, only what has changed. */
  show(conversation, busy) {
    const other = this.conversation?.id !== conversation.id;
    if (other) {
      this.views.clear();
      this.list.replaceChildren();
    }
    this.conversation = conversation;
    this.busy = busy;
    const nodes = path(conversation);
    const views = new Map(nodes.map((node) => [node.id, this.views.get(node.id) ?? new MessageView(node, this.actions)]));
    for (const [id, view] of this.views) if (!views.has(id)) view.element.remove();
    this.views = views;
    let previous = null;
    for (const node of nodes) {
      const view = views.get(node.id);
      view.node = node;
      view.update(siblings(conversation, node), busy);
      const wanted = previous ? previous.nextElementSibling : this.list.firstElementChild;
      if (wanted !== view.element) this.list.insertBefore(view.element, wanted);
      previous = view.element;
    }
    byId("empty").hidden = nodes.length > 0;
    if (other) this.toEnd();
    else this.follow();
  }

  /** Shows what came of a message since; at most once a frame. */
  changed(node) {
    if (this.frame) return;
    const draw = () => {
      this.frame = null;
      this.draw(node);
    };
    this.frame = document.hidden ? setTimeout(draw, 200) : requestAnimationFrame(draw);
  }

  draw(node) {
    const view = this.views.get(node.id);
    if (view) view.update(siblings(this.conversation, node), this.busy);
    this.follow();
  }

  edit(node) {
    this.views.get(node.id)?.edit();
  }

  /** Scrolling up leaves the end; what is added below does not. */
  scrolled() {
    const { scrollTop, scrollHeight, clientHeight } = this.scroller;
    const near = scrollHeight - scrollTop - clientHeight < NEAR;
    if (near) this.following = true;
    else if (scrollTop < this.top - 1) this.following = false;
    this.top = scrollTop;
    this.jump.hidden = near || this.following;
  }

  /** Browsers report scrolling a frame late: whether the reader has left the end is asked anew before going there. */
  follow() {
    this.scrolled();
    if (!this.following) return;
    this.scroller.scrollTop = this.scroller.scrollHeight;
    this.top = this.scroller.scrollTop;
  }

  toEnd() {
    this.following = true;
    this.top = 0;
    this.follow();
  }
}

// The list of conversations. On a narrow window it lies over the page and is opened by a button.

import { byId, element, icon, iconButton } from "./dom.js";

const NARROW = "(max-width: 760px)";
const DAY = 24 * 3600 * 1000;

export class Sidebar {
  /** actions: open(id), create(), remove(id), rename(id, title). */
  constructor(actions) {
    this.actions = actions;
    this.panel = byId("sidebar");
    this.list = byId("conversations");
    this.opener = byId("menu");
    this.narrow = matchMedia(NARROW);
    this.narrow.addEventListener("change", () => this.close());
    this.opener.addEventListener("click", () => this.toggle());
    byId("scrim").addEventListener("click", () => this.close());
    byId("new").addEventListener("click", () => this.then(() => actions.create()));
    this.panel.addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || !this.narrow.matches) return;
      event.stopPropagation();
      this.close();
      this.opener.focus();
    });
    this.close();
  }

  then(action) {
    if (this.narrow.matches) this.close();
    action();
  }

  toggle() {
    const opened = document.body.classList.toggle(this.narrow.matches ? "sidebar-open" : "sidebar-hidden");
    this.reflect();
    if (opened && this.narrow.matches) byId("new").focus();
  }

  close() {
    document.body.classList.remove("sidebar-open");
    this.reflect();
  }

  /** What is not seen takes no focus. */
  reflect() {
    const { classList } = document.body;
    const visible = this.narrow.matches ? classList.contains("sidebar-open") : !classList.contains("sidebar-hidden");
    this.panel.inert = !visible;
    byId("main").inert = visible && this.narrow.matches;
    this.opener.setAttribute("aria-expanded", String(visible));
  }

  /** rows: [{id, title, updated}], the latest first; running: ids whose answer is being computed. */
  show(rows, openId, running) {
    const focused = document.activeElement?.closest?.("[data-id]")?.dataset.id;
    let group = null;
    const items = [];
    for (const row of rows) {
      const name = groupOf(row.updated);
      if (name !== group) items.push(element("li", { class: "group", role: "presentation" }, name));
      group = name;
      items.push(this.item(row, row.id === openId, running.has(row.id)));
    }
    if (!rows.length) items.push(element("li", { class: "group" }, "No conversations yet"));
    this.list.replaceChildren(...items);
    if (focused) this.list.querySelector(`[data-id="${CSS.escape(focused)}"] button`)?.focus();
  }

  item(row, current, running) {
    const title = row.title || "Untitled";
    return element("li", { "data-id": row.id, class: current ? "current" : null },
      element("button", { type: "button", class: "title", title, "aria-current": current ? "page" : null,
        click: () => this.then(() => this.actions.open(row.id)) },
      running && element("span", { class: "dot", role: "img", "aria-label": "Answering" }), title),
      iconButton("edit", `Rename ${title}`, () => this.rename(row)),
      iconButton("trash", `Delete ${title}`, () => this.actions.remove(row.id)));
  }

  rename(row) {
    const item = this.list.querySelector(`[data-id="${CSS.escape(row.id)}"]`);
    let ended = false;
    const end = (keep) => {
      if (ended) return;
      ended = true;
      const title = field.value.trim();
      if (keep && title) this.actions.rename(row.id, title);
      else this.actions.rename(row.id, row.title);
    };
    const field = element("input", { "aria-label": "Title of the conversation", maxlength: "120", blur: () => end(true),
      keydown: (event) => {
        if (event.key !== "Enter" && event.key !== "Escape") return;
        event.stopPropagation();
        event.preventDefault();
        end(event.key === "Enter");
      } });
    field.value = row.title;
    item.replaceChildren(field);
    field.select();
    field.focus();
  }
}

function groupOf(time) {
  const midnight = new Date().setHours(0, 0, 0, 0);
  if (time >= midnight) return "Today";
  if (time >= midnight - DAY) return "Yesterday";
  if (time >= midnight - 6 * DAY) return "This week";
  return "Earlier";
}

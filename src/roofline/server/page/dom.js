// Elements and icons. No text is ever read as HTML: all nodes come from here and from render.js.

/**
 * An element. `attributes`: strings become attributes, functions listeners, true an empty attribute;
 * false, null and undefined are left out. `children`: nodes and strings.
 */
export function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === false || value === null || value === undefined) continue;
    if (typeof value === "function") node.addEventListener(name, value);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

export const byId = (id) => document.getElementById(id);

// Paths on a grid of 24 x 24, drawn as lines.
const ICONS = {
  menu: "M4 7h16M4 12h16M4 17h16",
  plus: "M12 5v14M5 12h14",
  send: "M12 19V5M6 11l6-6 6 6",
  stop: "M7 7h10v10H7z",
  copy: "M9 9h10v11H9zM5 15V4h10",
  check: "M5 12.5l4.5 4.5L19 7.5",
  edit: "M4 20h4L19 9l-4-4L4 16zM13.5 6.5l4 4",
  again: "M20 12a8 8 0 1 1-2.4-5.7M20 4v4.5h-4.5",
  left: "M14.5 6l-6 6 6 6",
  right: "M9.5 6l6 6-6 6",
  down: "M12 5v14M6 13l6 6 6-6",
  close: "M6 6l12 12M18 6L6 18",
  trash: "M5 7h14M10 7V4.5h4V7M7 7l1 13h8l1-13M10.5 11v5.5M13.5 11v5.5",
  attach: "M19 11.5l-7.3 7.3a4.6 4.6 0 0 1-6.5-6.5l8-8a3.1 3.1 0 0 1 4.4 4.4l-7.9 7.9a1.5 1.5 0 0 1-2.2-2.2l7-7",
  settings: "M4 8h9M17 8h3M4 16h3M11 16h9M15 5.5v5M9 13.5v5",
  sun: "M12 8a4 4 0 1 0 0 8 4 4 0 0 0 0-8zM12 2.5v2M12 19.5v2M2.5 12h2M19.5 12h2M5.3 5.3l1.4 1.4M17.3 17.3l1.4 1.4M5.3 18.7l1.4-1.4M17.3 6.7l1.4-1.4",
  moon: "M20 14.5A8.5 8.5 0 0 1 9.5 4a8.5 8.5 0 1 0 10.5 10.5z",
  auto: "M12 3.5a8.5 8.5 0 1 0 0 17zM12 3.5a8.5 8.5 0 0 1 0 17",
  file: "M6 3.5h8l4 4v13H6zM14 3.5v4h4",
  export: "M12 15V4M7.5 8.5L12 4l4.5 4.5M5 14v6h14v-6",
  import: "M12 4v11M7.5 10.5L12 15l4.5-4.5M5 14v6h14v-6",
};
const SVG = "http://www.w3.org/2000/svg";

/** An icon, which screen readers pass over: the button around it has the name. */
export function icon(name) {
  const svg = document.createElementNS(SVG, "svg");
  for (const [key, value] of Object.entries({ viewBox: "0 0 24 24", "aria-hidden": "true", class: "icon" })) {
    svg.setAttribute(key, value);
  }
  const path = document.createElementNS(SVG, "path");
  path.setAttribute("d", ICONS[name]);
  svg.append(path);
  return svg;
}

/** A button with an icon and a name that is read and shown as a tip. */
export function iconButton(name, label, onclick, attributes = {}) {
  return element("button", { type: "button", class: "icon-button", "aria-label": label, title: label, click: onclick,
    ...attributes }, icon(name));
}

/** Copies text and shows on the button that it did, or that it could not. */
export async function copyFrom(button, text) {
  const before = button.getAttribute("aria-label");
  let message = "Copied";
  try {
    await copy(text);
  } catch {
    message = "The browser did not allow copying";
  }
  button.replaceChildren(icon(message === "Copied" ? "check" : "close"));
  button.setAttribute("aria-label", message);
  announce(message);
  setTimeout(() => {
    button.replaceChildren(icon("copy"));
    button.setAttribute("aria-label", before);
  }, 1500);
}

async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  // Over plain HTTP from another machine there is no clipboard object.
  const area = element("textarea", { class: "off-screen", "aria-hidden": "true" });
  area.value = text;
  document.body.append(area);
  area.select();
  const worked = document.execCommand("copy");
  area.remove();
  if (!worked) throw new Error("not copied");
}

/** Has screen readers say a text once they have finished what they say now. */
export function announce(text) {
  const region = byId("announcer");
  region.append(element("p", {}, text));
  while (region.childElementCount > 20) region.firstChild.remove();
}

/** A line at the lower edge for some seconds, with at most one action. */
export function toast(text, { label, action, seconds = 6 } = {}) {
  const line = element("div", { class: "toast" }, element("span", {}, text));
  const end = setTimeout(() => line.remove(), seconds * 1000);
  if (action) {
    line.append(element("button", { type: "button", class: "text-button", click: () => {
      clearTimeout(end);
      line.remove();
      action();
    } }, label));
  }
  const region = byId("toasts");
  region.append(line);
  while (region.childElementCount > 3) region.firstChild.remove();
}

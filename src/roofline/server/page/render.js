// Blocks of Markdown -> elements. Only the tags and attributes that stand in this file can come of a text.

import { copyFrom, element, iconButton } from "./dom.js";
import { parseInline } from "./inline.js";
import { Growing, parse } from "./markdown.js";

/** The elements of a text. */
export const render = (text) => parse(text).map((block) => renderBlock(block));

function renderBlock(block, open = false) {
  switch (block.type) {
    case "heading":
      // The page has headings of its own above: an answer's begin at the third level.
      return element(`h${Math.min(6, block.level + 2)}`, {}, ...inline(block.text, open));
    case "code":
      return code(block, open);
    case "rule":
      return element("hr");
    case "quote":
      return element("blockquote", {}, ...blocks(block.blocks, open));
    case "list":
      return list(block, open);
    case "table":
      return table(block, open);
    default:
      return element("p", {}, ...inline(block.text, open));
  }
}

const blocks = (all, open) => all.map((block, i) => renderBlock(block, open && i === all.length - 1));

function list(block, open) {
  const items = block.items.map((item, i) => {
    const grows = open && i === block.items.length - 1;
    const [first, ...rest] = item;
    if (first?.type !== "paragraph") return element("li", {}, ...blocks(item, grows));
    return element("li", {}, ...inline(first.text, grows && !rest.length), ...blocks(rest, grows));
  });
  if (!block.ordered) return element("ul", {}, ...items);
  return element("ol", block.start === 1 ? {} : { start: block.start }, ...items);
}

function table(block, open) {
  const row = (tag, texts, grows) => element("tr", {}, ...texts.map((text, i) => {
    const side = block.align[i];
    const attributes = { class: side && side !== "left" ? `at-${side}` : null, scope: tag === "th" ? "col" : null };
    return element(tag, attributes, ...inline(text, grows));
  }));
  const body = block.rows.map((texts, i) => row("td", texts, open && i === block.rows.length - 1));
  return element("div", { class: "wide", tabindex: "0", role: "region", "aria-label": "Table" },
    element("table", {}, element("thead", {}, row("th", block.head, open)), element("tbody", {}, ...body)));
}

function code(block) {
  const language = block.language.slice(0, 40);
  const button = iconButton("copy", "Copy this code", () => copyFrom(button, block.text));
  return element("div", { class: "code" },
    element("div", { class: "code-head" }, element("span", {}, language || "text"), button),
    element("pre", { tabindex: "0", role: "region", "aria-label": language ? `Code in ${language}` : "Code" },
      element("code", {}, block.text)));
}

function inline(text, open) {
  return parseInline(text, open).map(toElement);
}

function toElement(node) {
  switch (node.type) {
    case "text":
      return document.createTextNode(node.text);
    case "code":
      return element("code", {}, node.text);
    case "break":
      return element("br");
    case "link":
      return element("a", { href: node.href, rel: "noopener noreferrer nofollow", target: "_blank" },
        ...node.children.map(toElement));
    default:
      return element(node.type, {}, ...node.children.map(toElement)); // em, strong, del
  }
}

/** Shows a text that grows in `parent`: elements of blocks that did not change stay what they are. */
export class View {
  constructor(parent) {
    this.parent = parent;
    this.growing = new Growing();
    this.shown = []; // {source, node} of each block; an index into the parent's children would be counted out each time
  }

  update(text, open) {
    const all = this.growing.blocks(text, open);
    all.forEach((block, i) => {
      const grows = open && i === all.length - 1;
      const source = `${grows ? "+" : ""}${block.source}`;
      const before = this.shown[i];
      if (before?.source === source) return;
      if (before && grows && block.type === "code" && grow(before.node, block)) {
        before.source = source;
        return;
      }
      const node = renderBlock(block, grows);
      if (before) before.node.replaceWith(node);
      else this.parent.append(node);
      this.shown[i] = { source, node };
    });
    for (const { node } of this.shown.splice(all.length)) node.remove();
  }
}

/** Appends to a code block what came since, so that a selection in it and its scroll position stay. */
function grow(node, block) {
  const text = node.querySelector(":scope > pre > code")?.firstChild;
  if (!text || !block.text.startsWith(text.data)) return false;
  text.appendData(block.text.slice(text.data.length));
  return node.querySelector(".code-head span").textContent === (block.language.slice(0, 40) || "text");
}

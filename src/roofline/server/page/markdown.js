// Markdown -> blocks, plain data that render.js turns into elements. A block ends where a later line cannot change it,
// so while a text grows only its last block is read again (see `Growing`).
//
// Blocks: paragraph {text}, heading {level, text}, code {language, text}, rule, quote {blocks},
// list {ordered, start, items: [blocks]}, table {align, head, rows}. Each has `source`: equal sources, equal blocks.

const MOST_DEEP = 10;
const MOST_COLUMNS = 40;
const FENCE = /^ {0,3}(`{3,}|~{3,})[ \t]*([^`\n]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t]+|$)/;
const RULE = /^ {0,3}(?:(?:\*[ \t]*){3,}|(?:-[ \t]*){3,}|(?:_[ \t]*){3,})$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])(?:([ \t]+)(?=\S)|[ \t]*$)/;
const DELIMITER_CELL = /^:?-+:?$/;

/** `open`: the text still grows, so marks that are only begun at its end are not shown as characters. */
export function parse(text, open = false, depth = 0) {
  return new Blocks(text.replace(/\r\n?/g, "\n").split("\n"), open, depth).parse();
}

class Blocks {
  constructor(lines, open, depth) {
    Object.assign(this, { lines, open, depth, at: 0, blocks: [] });
  }

  parse() {
    while (this.at < this.lines.length) {
      const begin = this.at;
      const block = this.lines[begin].trim() ? this.next(this.lines[begin]) : null;
      if (this.at === begin) this.at += 1;
      if (block) this.blocks.push({ ...block, line: begin, source: this.lines.slice(begin, this.at).join("\n") });
    }
    return this.blocks;
  }

  get last() {
    return this.at >= this.lines.length - 1;
  }

  next(line) {
    const fence = FENCE.exec(line);
    if (fence) return this.code(fence);
    if (this.open && this.last && isBegun(line)) return null;
    if (RULE.test(line)) return { type: "rule" };
    const heading = HEADING.exec(line);
    if (heading) {
      const text = line.slice(heading[0].length).trimEnd().replace(/(?:^|[ \t])#{1,99}$/, "").trim();
      return text || !(this.open && this.last) ? { type: "heading", level: heading[1].length, text } : null;
    }
    if (this.depth < MOST_DEEP) {
      if (QUOTE.test(line)) return this.quote();
      if (ITEM.test(line)) return this.list(ITEM.exec(line));
    }
    return this.table() ?? this.paragraph();
  }

  code([, fence, info]) {
    const indent = this.lines[this.at].search(/\S/);
    const body = [];
    for (this.at += 1; this.at < this.lines.length; this.at += 1) {
      const line = this.lines[this.at];
      const end = line.trim();
      if (end.length >= fence.length && end === fence[0].repeat(end.length) && line.search(/\S/) < 4) {
        this.at += 1;
        return { type: "code", language: info.trim().split(/\s/)[0], text: body.join("\n") };
      }
      body.push(line.slice(Math.min(indent, Math.max(0, line.search(/\S|$/)))));
    }
    // It still grows: a last line of fence characters is about to end it.
    if (this.open && body.length && /^ {0,3}(`{1,99}|~{1,99})$/.test(body.at(-1))) body.pop();
    return { type: "code", language: info.trim().split(/\s/)[0], text: body.join("\n") };
  }

  quote() {
    const inside = [];
    while (this.at < this.lines.length) {
      const line = this.lines[this.at];
      const mark = QUOTE.exec(line);
      if (!mark && (!line.trim() || !inside.at(-1)?.trim() || this.interrupts(line))) break;
      inside.push(mark ? line.slice(mark[0].length) : line);
      this.at += 1;
    }
    return { type: "quote", blocks: this.inner(inside) };
  }

  inner(lines) {
    return new Blocks(lines, this.open && this.at >= this.lines.length, this.depth + 1).parse();
  }

  list(first) {
    const ordered = /\d/.test(first[2]);
    const kind = first[2].at(-1); // another mark begins another list
    const items = [];
    while (this.at < this.lines.length) {
      const mark = ITEM.exec(this.lines[this.at]);
      if (!mark || mark[2].at(-1) !== kind || RULE.test(this.lines[this.at])) break;
      items.push(this.item(mark));
      let next = this.at;
      while (next < this.lines.length && !this.lines[next].trim()) next += 1;
      if (next < this.lines.length && ITEM.exec(this.lines[next])?.[2].at(-1) === kind) this.at = next;
      else break;
    }
    return { type: "list", ordered, start: ordered ? Number.parseInt(first[2], 10) : 1, items };
  }

  item([mark, indent, bullet, space]) {
    const width = space && space.length <= 4 ? mark.length : indent.length + bullet.length + 1;
    const inside = [this.lines[this.at].slice(space ? width : mark.length)];
    for (this.at += 1; this.at < this.lines.length; this.at += 1) {
      const line = this.lines[this.at];
      const column = line.search(/\S/);
      if (column < 0) {
        const rest = this.lines.slice(this.at + 1, this.at + 3).find((each) => each.trim());
        if (rest === undefined || rest.search(/\S/) < Math.min(width, 2)) break;
        inside.push("");
      } else if (column >= width) inside.push(line.slice(width));
      else if (column >= 2 && column >= indent.length + 2) inside.push(line.slice(column)); // models indent by two or three
      else if (!inside.at(-1).trim() || ITEM.test(line) || this.interrupts(line)) break;
      else inside.push(line.trimStart());
    }
    return this.inner(inside);
  }

  table() {
    const { lines, at } = this;
    if (!lines[at].includes("|")) return null;
    const align = at + 1 < lines.length ? alignments(lines[at + 1]) : null;
    const begun = this.open && lines[at].trimStart().startsWith("|")
      && (this.last || (at + 2 === lines.length && /^[ \t|:-]*$/.test(lines[at + 1])));
    const head = cells(lines[at]);
    if (!begun && (!align || align.length !== head.length)) return null;
    this.at = begun ? lines.length : at + 2;
    const rows = [];
    while (this.at < lines.length && lines[this.at].trim() && !this.interrupts(lines[this.at])) {
      const row = cells(lines[this.at]).slice(0, head.length);
      rows.push([...row, ...Array(head.length - row.length).fill("")]);
      this.at += 1;
    }
    return { type: "table", align: align ?? [], head, rows };
  }

  paragraph() {
    const inside = [];
    while (this.at < this.lines.length) {
      const line = this.lines[this.at];
      const isStart = inside.length && (this.interrupts(line) || this.beginsList(line) || this.beginsTable());
      if (!line.trim() || isStart) break;
      if (inside.length && this.open && this.last && isBegun(line)) {
        this.at += 1;
        break;
      }
      inside.push(line.trimStart());
      this.at += 1;
    }
    return { type: "paragraph", text: inside.join("\n").trimEnd() };
  }

  /** Whether a line ends the paragraph before it. */
  interrupts(line) {
    return FENCE.test(line) || HEADING.test(line) || RULE.test(line) || (this.depth < MOST_DEEP && QUOTE.test(line));
  }

  beginsList(line) {
    const mark = this.depth < MOST_DEEP && ITEM.exec(line);
    return Boolean(mark && mark[3] && (!/\d/.test(mark[2]) || Number.parseInt(mark[2], 10) === 1));
  }

  beginsTable() {
    const [line, next] = [this.lines[this.at], this.lines[this.at + 1] ?? ""];
    return line.includes("|") && next.includes("|") && alignments(next)?.length === cells(line).length;
  }
}

/** Whether a last line is only the beginning of a mark: of a fence, a rule, a heading, a quote or an item. */
const isBegun = (line) => /^ {0,3}(?:`{1,2}|~{1,2}|[-*_+]{1,2}|#{1,6}|>|\d{1,3}[.)]?)[ \t]*$/.test(line);

/** The cells of a table's line; a bar behind a backslash or in code is none of its bars. */
function cells(line) {
  const result = [""];
  let inCode = false;
  const text = line.trim().replace(/^\|/, "");
  for (let i = 0; i < text.length; i += 1) {
    const character = text[i];
    if (character === "\\" && text[i + 1] === "|") {
      result[result.length - 1] += "|";
      i += 1;
    } else if (character === "|" && !inCode && result.length < MOST_COLUMNS) result.push("");
    else {
      if (character === "`") inCode = !inCode && text.indexOf("`", i + 1) > 0;
      result[result.length - 1] += character;
    }
  }
  if (result.length > 1 && !result.at(-1).trim()) result.pop();
  return result.map((cell) => cell.trim());
}

function alignments(line) {
  if (!line.includes("-") || !/^[ \t|:-]+$/.test(line)) return null;
  const marks = cells(line);
  if (!marks.every((mark) => DELIMITER_CELL.test(mark))) return null;
  return marks.map((mark) => (mark.endsWith(":") ? (mark.startsWith(":") ? "center" : "right") : "left"));
}

/** The blocks of a text that grows: what is before the last block is read once. */
export class Growing {
  constructor() {
    this.text = "";
    this.done = []; // blocks that will not change
    this.offset = 0; // of the text after them
  }

  /** All blocks of a text that begins with the one before. */
  blocks(text, open) {
    if (!text.startsWith(this.text)) Object.assign(this, { done: [], offset: 0 });
    this.text = text;
    const tail = text.slice(this.offset);
    const blocks = parse(tail, open);
    const last = blocks.at(-1);
    const all = [...this.done, ...blocks];
    if (blocks.length > 1) {
      this.done.push(...blocks.slice(0, -1));
      this.offset += offsetOf(tail, last.line);
    }
    return all;
  }
}

function offsetOf(text, line) {
  let offset = 0;
  for (let i = 0; i < line; i += 1) offset = text.indexOf("\n", offset) + 1;
  return offset;
}

// The inside of a Markdown block: text -> nodes {type, ...}. Time is linear in the text, nesting is bounded.
//
// Types: text {text}, code {text}, break, em, strong, del {children}, link {href, children}.

const MOST_DEEP = 12;
const PUNCTUATION = /[!-/:-@[-`{-~]/;
const SPACE = /\s/;
const SPECIAL = /[\\`*_~[\]!<\nh]/g;
const TYPES = { "*1": "em", _1: "em", "*2": "strong", _2: "strong", "~2": "del" };

/** The address, if it is one that the page links to: http and https with a host, nothing else. */
export function safeAddress(text) {
  if (!/^https?:\/\//i.test(text) || text.length > 2000) return null;
  try {
    const { protocol, href } = new URL(text);
    return protocol === "http:" || protocol === "https:" ? href : null;
  } catch {
    return null;
  }
}

/** `open`: the text still grows, so marks that are open at its end count as closed there. */
export function parseInline(text, open = false) {
  return new Inline(text, open).parse();
}

class Inline {
  constructor(text, open) {
    this.text = text;
    this.open = open;
    this.at = 0;
    this.frames = [{ mark: "", nodes: [] }]; // what is open: emphasis and links, outermost first
    this.absent = new Set(); // lengths of runs of ` that do not come again
  }

  parse() {
    const { text } = this;
    while (this.at < text.length) {
      SPECIAL.lastIndex = this.at;
      const next = SPECIAL.exec(text)?.index ?? text.length;
      if (next > this.at) this.add(text.slice(this.at, next));
      this.at = next;
      if (next < text.length) this.special(text[next]);
    }
    while (this.frames.length > 1) {
      const frame = this.frames.at(-1);
      if (this.open && frame.type) this.close(frame);
      else if (this.open && !frame.type) this.unwrap("");
      else this.unwrap(frame.mark);
    }
    return this.frames[0].nodes;
  }

  /** Takes one special character, or what it begins. */
  special(character) {
    if (character === "\\") return this.escape();
    if (character === "`") return this.code();
    if (character === "*" || character === "_" || character === "~") return this.emphasis(character);
    if (character === "[" || (character === "!" && this.text[this.at + 1] === "[")) return this.openLink(character);
    if (character === "]") return this.closeLink();
    if (character === "\n") return this.lineBreak();
    if (character === "<" || character === "h") return this.address(character);
    return this.literal(1);
  }

  literal(length) {
    this.add(this.text.slice(this.at, this.at + length));
    this.at += length;
  }

  add(text) {
    const { nodes } = this.frames.at(-1);
    const last = nodes.at(-1);
    if (last?.type === "text") last.text += text;
    else if (text) nodes.push({ type: "text", text });
  }

  push(node) {
    this.frames.at(-1).nodes.push(node);
  }

  escape() {
    const next = this.text[this.at + 1];
    if (next === "\n") this.at += 1;
    else if (next !== undefined && PUNCTUATION.test(next)) {
      this.add(next);
      this.at += 2;
    } else this.literal(1);
  }

  lineBreak() {
    const last = this.frames.at(-1).nodes.at(-1);
    if (last?.type === "text") last.text = last.text.replace(/ {1,8}$/, "");
    this.push({ type: "break" });
    this.at += 1;
    while (this.text[this.at] === " ") this.at += 1;
  }

  addAll(nodes) {
    for (const node of nodes) {
      if (node.type === "text") this.add(node.text);
      else this.push(node);
    }
  }

  run(character) {
    let end = this.at;
    while (this.text[end] === character) end += 1;
    return end - this.at;
  }

  code() {
    const { text } = this;
    const length = this.run("`");
    const begin = this.at + length;
    let end = -1;
    if (!this.absent.has(length)) {
      for (let i = begin; i < text.length; ) {
        const tick = text.indexOf("`", i);
        if (tick < 0) break;
        let after = tick;
        while (text[after] === "`") after += 1;
        if (after - tick === length) {
          end = tick;
          break;
        }
        i = after;
      }
      if (end < 0) this.absent.add(length);
    }
    if (end < 0 && this.open) {
      if (begin < text.length) this.push({ type: "code", text: text.slice(begin).replace(/`+$/, "") });
      this.at = text.length;
    } else if (end < 0) {
      this.literal(length);
    } else {
      let inside = text.slice(begin, end).replaceAll("\n", " ");
      if (inside.startsWith(" ") && inside.endsWith(" ") && inside.trim()) inside = inside.slice(1, -1);
      this.push({ type: "code", text: inside });
      this.at = end + length;
    }
  }

  emphasis(character) {
    const { text } = this;
    let length = this.run(character);
    const before = text[this.at - 1] ?? " ";
    const after = text[this.at + length] ?? (this.open ? "x" : " ");
    const atEnd = this.at + length === text.length;
    const [spaceBefore, spaceAfter] = [SPACE.test(before), SPACE.test(after)];
    const [markBefore, markAfter] = [PUNCTUATION.test(before), PUNCTUATION.test(after)];
    const leftFlanking = !spaceAfter && (!markAfter || spaceBefore || markBefore);
    const rightFlanking = !spaceBefore && (!markBefore || spaceAfter || markAfter || atEnd);
    const inWord = character === "_";
    const canOpen = leftFlanking && !(inWord && rightFlanking && !markBefore);
    const canClose = rightFlanking && !(inWord && leftFlanking && !markAfter && !atEnd);
    const longest = length;
    while (length && canClose && this.closes(character, length)) {
      const frame = this.closes(character, length);
      this.at += frame.mark.length;
      length -= frame.mark.length;
      this.close(frame);
    }
    if (!length) return;
    // At the end of a growing text a mark is about to open or close something: it is not shown as a character.
    if (atEnd && this.open && (canOpen || longest !== length)) {
      this.at += length;
      return;
    }
    while (length && canOpen && this.frames.length < MOST_DEEP) {
      const size = character === "~" ? 2 : Math.min(2, length);
      if (size > length || length > 8) break;
      const mark = character.repeat(size);
      this.frames.push({ mark, type: TYPES[`${character}${size}`], nodes: [] });
      this.at += size;
      length -= size;
    }
    if (length) this.literal(length);
  }

  /** The innermost open frame that a run of so many characters ends; frames outside of an open link are not reached. */
  closes(character, length) {
    for (let i = this.frames.length - 1; i > 0; i -= 1) {
      const { mark } = this.frames[i];
      if (mark[0] === character && mark.length <= length && this.frames[i].nodes.length) return this.frames[i];
    }
    return null;
  }

  /** Ends a frame as what it is; frames that are open inside of it were no marks. */
  close(frame) {
    while (this.frames.at(-1) !== frame) this.unwrap(this.frames.at(-1).mark);
    this.frames.pop();
    if (frame.nodes.length) this.push({ type: frame.type, children: frame.nodes });
  }

  /** Ends the innermost frame as text: its mark was none. */
  unwrap(mark) {
    const { nodes } = this.frames.pop();
    if (mark) this.add(mark);
    this.addAll(nodes);
  }

  openLink(character) {
    const length = character === "!" ? 2 : 1;
    if (this.frames.length >= MOST_DEEP || this.frames.some((frame) => frame.mark.endsWith("["))) {
      return this.literal(length);
    }
    // An image would be asked for from somewhere else: it is shown as a link.
    this.frames.push({ mark: length === 2 ? "![" : "[", nodes: [] });
    this.at += length;
  }

  closeLink() {
    const frame = this.frames.findLast((each) => each.mark.endsWith("["));
    if (!frame) return this.literal(1);
    while (this.frames.at(-1) !== frame) {
      this.unwrap(this.frames.at(-1).mark);
    }
    const target = this.destination(this.at + 1);
    if (target) {
      this.frames.pop();
      this.at = target.end;
      const href = target.complete ? safeAddress(target.address) : null;
      const children = frame.nodes.length ? frame.nodes : [{ type: "text", text: target.address }];
      if (href) this.push({ type: "link", href, children });
      else if (!target.complete) this.addAll(frame.nodes);
      else {
        // Not an address that is linked to: what was written, as text.
        this.add(frame.mark);
        this.addAll(frame.nodes);
        this.add(`](${target.address})`);
      }
      return;
    }
    this.unwrap(frame.mark);
    this.literal(1);
  }

  /** `(address "title")` at a position: {address, end, complete}, or null. */
  destination(begin) {
    const { text } = this;
    const rest = { address: "", end: text.length, complete: false }; // of a text that still grows
    if (text[begin] !== "(") return this.open && begin === text.length ? rest : null;
    let depth = 0;
    let quoted = false;
    const most = Math.min(text.length, begin + 1000);
    for (let i = begin; i < most; i += 1) {
      const character = text[i];
      if (character === "\n") return null;
      if (character === '"') quoted = !quoted;
      else if (!quoted && character === "(") depth += 1;
      else if (!quoted && character === ")" && --depth === 0) {
        const inside = text.slice(begin + 1, i).trim();
        const address = (inside.match(/^(\S+)(?: +"[^"]*")?$/)?.[1] ?? inside).replace(/^<(.*)>$/, "$1");
        return { address, end: i + 1, complete: true };
      }
    }
    return this.open && most === text.length ? rest : null;
  }

  /** An address in angle brackets, or a bare one. */
  address(character) {
    const { text } = this;
    const begin = character === "<" ? this.at + 1 : this.at;
    const before = text[this.at - 1] ?? " ";
    if (!text.startsWith("http", begin) || (character === "h" && /\w/.test(before))) return this.literal(1);
    const pattern = /https?:\/\/[^\s<>"`]{1,2000}/y;
    pattern.lastIndex = begin;
    let address = pattern.exec(text)?.[0];
    if (!address || (character === "<" && text[begin + address.length] !== ">")) return this.literal(1);
    if (character === "h") address = trimmed(address);
    const href = safeAddress(address);
    const inLink = this.frames.some((frame) => frame.mark.endsWith("["));
    if (!href || inLink) return this.literal(character === "<" ? 1 : address.length);
    this.push({ type: "link", href, children: [{ type: "text", text: address }] });
    this.at = begin + address.length + (character === "<" ? 1 : 0);
  }
}

/** Without the punctuation behind a bare address, and a bracket that was opened before it. */
function trimmed(address) {
  let result = address.replace(/[*_~]{1,8}$/, "");
  for (;;) {
    const last = result.at(-1);
    const isClosing = last === ")" && result.split(")").length > result.split("(").length;
    if (!/[.,;:!?'\]|]/.test(last) && !isClosing) return result;
    result = result.slice(0, -1);
  }
}

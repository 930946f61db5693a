"""Answers of a model as elements of the chat page: what Markdown means, what a hostile text cannot do, how it grows."""

import json

import pytest

# A text of elements: tags without attributes, but the address of a link, the class of a cell, the start of a list.
OUTLINE = """
const { render, View } = await import("/page/render.js");
const outline = (node) => {
  if (node.nodeType === Node.TEXT_NODE) return node.data;
  if (node.classList.contains("code")) {
    return `[code ${node.querySelector(".code-head span").textContent}|${node.querySelector("pre").textContent}]`;
  }
  if (node.classList.contains("wide")) return outline(node.firstChild);
  const tag = node.localName;
  const extra = ["href", "class", "start"].map((name) => node.getAttribute(name)).filter(Boolean).map((x) => ` ${x}`);
  const inside = [...node.childNodes].map(outline).join("");
  return `<${tag}${extra.join("")}>${inside}`;
};
const show = (text) => render(text).map(outline).join("");
const grown = (texts, open) => {
  const parent = document.createElement("div");
  const view = new View(parent);
  for (const text of texts) view.update(text, true);
  if (!open) view.update(texts.at(-1), false);
  return parent;
};
"""
SAMPLE = """\
The **roofline model** has *two* roofs, see [the paper](https://example.org/a_(b) "title") or `min(a, b)`.

## How to `read` it

1. Count the operations.
2. Divide:
   - by bytes, ~~not words~~
   - once

   A second paragraph of the item.

```python
def f(x):
    return x ** 2  # ``not`` a fence


print(f(3))
```

| phase | intensity |
|:---|---:|
| decode | 0.5 |
| **prefill** | 250 |

> A quote with **weight**,
> on two lines.

---

The end: 2 * 3 * 4, snake_case_name, and https://example.org/x?y=1.
"""


def run(page, body):
    return page.evaluate(f"(async () => {{ {OUTLINE} {body} }})()")


CASES = {
    "a **b *c* d** _e_ ~~f~~ ***g***": "<p>a <strong>b <em>c d <em>e <del>f <strong><em>g",
    "snake_case_name and 2 * 3 * 4 and **open": "<p>snake_case_name and 2 * 3 * 4 and **open",
    "one\ntwo": "<p>one<br>two",
    "one\n\ntwo": "<p>one<p>two",
    "`a *b*` and `` c ` d ``": "<p><code>a *b* and <code>c ` d",
    "\\*no\\* \\[no](x)": "<p>*no* [no](x)",
    "# One\n### Three #": "<h3>One<h5>Three",
    "- a\n- b\n  - c\n* d": "<ul><li>a<li>b<ul><li>c<ul><li>d",
    "3. a\n4. b": "<ol 3><li>a<li>b",
    "1. a\n\n   b\n2. c": "<ol><li>a<p>b<li>c",
    "- a\n  ```js\n  x\n  ```\n- b": "<ul><li>a[code js|x]<li>b",
    "```\n<b>\n": "[code text|<b>\n]",
    "~~~py\na\n```\n~~~\nb": "[code py|a\n```]<p>b",
    "> a\n> > b\n\nc": "<blockquote><p>a<blockquote><p>b<p>c",
    "***\n---": "<hr><hr>",
    "| a | b |\n|---|:-:|\n| `x|y` | 2 |\n| only |\n\nend": (
        "<table><thead><tr><th>a<th at-center>b<tbody><tr><td><code>x|y<td at-center>2<tr><td>only<td at-center><p>end"
    ),
    "a | b\nno table": "<p>a | b<br>no table",
    "[a *b*](https://x.org/y) <https://x.org> https://x.org/a_b).": (
        "<p><a https://x.org/y>a <em>b <a https://x.org/>https://x.org <a https://x.org/a_b>https://x.org/a_b)."
    ),
    "![a picture](https://x.org/p.png)": "<p><a https://x.org/p.png>a picture",
    "[a](javascript:alert(1)) [b](JAVASCRIPT:x) [c](data:text/html,x) [d](//x.org) [e](ftp://x.org)": (
        "<p>[a](javascript:alert(1)) [b](JAVASCRIPT:x) [c](data:text/html,x) [d](//x.org) [e](ftp://x.org)"
    ),
    "<script>alert(1)</script> <img src=x onerror=y> &amp;": (
        "<p><script>alert(1)</script> <img src=x onerror=y> &amp;"
    ),
}


def test_what_markdown_means(module_page):
    shown = run(module_page, f"return {json.dumps(list(CASES))}.map(show);")
    assert dict(zip(CASES, shown, strict=True)) == CASES


def test_a_hostile_text_makes_no_script_no_handler_and_no_other_link(module_page):
    """Random texts of pieces that mean something to somebody, whole and while they grow: only known elements with known
    attributes come of them, every link is http or https, and what has grown is what the whole text makes."""
    faults = run(
        module_page,
        """
        const pieces = ["<script>x</script>", "<img src=x onerror=alert(1)>", "javascript:alert(1)", "](javascript:x)",
          "[a](jAvAsCrIpT:x)", "[a](https://x.org)", "[a](https://x.org/\\"onclick=x)", "<https://x.org onclick=y>",
          "https://x.org/\\"onmouseover=y", "data:text/html,<b>", "[", "]", "(", ")", "![", "**", "*", "_", "~~", "`",
          "```", "~~~", "```html\\n", "\\n", "\\n\\n", "\\n- ", "\\n1. ", "\\n> ", "\\n# ", "\\n---\\n", "|",
          "\\n|-|-|\\n", "| a | b |", "\\\\", "<", ">", "&#x6a;", "\\u0000", "\\u202e", " ", "  ", "text", "\\t",
          "'", '"', "\\r\\n", "<style>*{}</style>", "<a href=javascript:x>", "[x]: javascript:y", "    code", "<!--",
          "]]>", "http://"];
        const allowed = { a: ["href", "rel", "target"], p: [], h3: [], h4: [], h5: [], h6: [], ul: [], ol: ["start"],
          li: [], blockquote: [], hr: [], br: [], em: [], strong: [], del: [], code: [], table: [], thead: [],
          tbody: [], tr: [], th: ["class", "scope"], td: ["class", "scope"], span: [], svg: ["viewBox", "aria-hidden",
          "class"], path: ["d"], div: ["class", "tabindex", "role", "aria-label"], pre: ["tabindex", "role",
          "aria-label"], button: ["type", "class", "aria-label", "title"] };
        let state = 7;
        const random = (n) => (state = (state * 1103515245 + 12345) % 2147483648, Math.floor((state / 2147483648) * n));
        const faults = [];
        for (let round = 0; round < 400 && faults.length < 5; round += 1) {
          const parts = Array.from({ length: 3 + random(25) }, () => pieces[random(pieces.length)]);
          const texts = parts.map((_, i) => parts.slice(0, i + 1).join(""));
          const text = texts.at(-1);
          const open = grown(texts, true);
          const parent = grown(texts, false);
          for (const node of [...open.querySelectorAll("*"), ...parent.querySelectorAll("*")]) {
            const names = allowed[node.localName];
            if (!names) faults.push([text, node.localName]);
            for (const { name, value } of node.attributes) {
              if (names && !names.includes(name)) faults.push([text, name]);
              if (name === "href" && !/^https?:[/][/]/.test(value)) faults.push([text, value]);
            }
            if (node.localName === "a" && node.rel !== "noopener noreferrer nofollow") faults.push([text, node.rel]);
          }
          const whole = show(text);
          const result = [...parent.children].map(outline).join("");
          if (whole !== result) faults.push([text, whole, result]);
        }
        return faults;
        """,
    )
    assert faults == []


def test_a_growing_text_does_not_jump(module_page):
    """Character by character: no mark is shown that will be none, no block becomes one of another kind, and no text
    that was shown disappears."""
    faults = run(
        module_page,
        f"""
        const text = {json.dumps(SAMPLE)};
        const parent = document.createElement("div");
        const view = new View(parent);
        const faults = [];
        let tags = [];
        let before = [];
        for (let end = 1; end <= text.length; end += 1) {{
          view.update(text.slice(0, end), true);
          const now = [...parent.children].map((node) => node.firstElementChild?.localName === "table" ? "table"
            : node.className || node.localName);
          tags.forEach((tag, i) => now[i] === tag || faults.push([text.slice(0, end).slice(-30), tag, now[i]]));
          const shown = [...parent.children].map((node) => node.querySelector("pre, table")?.textContent
            ?? node.textContent);
          before.forEach((old, i) => shown[i]?.startsWith(old.trimEnd()) || faults.push([old, shown[i]]));
          const outside = [...parent.querySelectorAll("p, li, h4, td, th, blockquote")];
          const prose = outside.flatMap((node) => [...node.childNodes])
            .filter((node) => node.nodeType === Node.TEXT_NODE).map((node) => node.data).join("|");
          if (/[*][*]|`|~~|[|]-|^#|[[]the/m.test(prose)) faults.push([text.slice(0, end).slice(-30), prose]);
          tags = now;
          before = shown;
        }}
        return faults.slice(0, 9);
        """,
    )
    assert not faults, faults


def test_blocks_that_did_not_change_stay_the_same_elements(module_page):
    """A selection in an answer survives what comes after it; so does the code that still grows."""
    kept, text = run(
        module_page,
        """
        const parent = document.createElement("div");
        const view = new View(parent);
        view.update("one\\n\\n```py\\na", true);
        const [first, code] = parent.children;
        const data = code.querySelector("code").firstChild;
        view.update("one\\n\\n```py\\na\\nb", true);
        const kept = [parent.children[0] === first, parent.children[1] === code,
          code.querySelector("code").firstChild === data];
        view.update("one\\n\\n```py\\na\\nb\\n```\\n\\nend", true);
        return [[...kept, parent.children[0] === first], parent.children[1].querySelector("pre").textContent];
        """,
    )
    assert kept == [True, True, True, True]
    assert text == "a\nb"


@pytest.mark.parametrize(
    "piece",
    ["**a", "|a|\n", "http://a",
     *(pytest.param(piece, marks=pytest.mark.slow) for piece in (
       "[](", "  - a\n", "[", "*", "`", "> ", "- ", "_a ", "![](", "](",
       "<http", "~~a~", "|", "|-", "\\", "1. ", "`` ` ", "((",
       '[a](b "', "- a\n", "> a\n", "```\n", "a\n\n", "# \n", "http://a)))", "\n"))],
)  # fmt: skip
def test_time_is_bounded_for_any_text(module_page, piece):
    """A hundred thousand characters, whole and grown: what takes quadratic time here takes minutes."""
    text = json.dumps((piece * 100_000)[:100_000])
    assert run(module_page, f"const text = {text}; show(text); grown([text, text + 'x'], true); return true;")


def test_nesting_is_bounded(module_page):
    """A text that nests thousands deep costs no stack."""
    depth = run(
        module_page,
        """
        const deep = (text) => {
          let most = 0;
          const walk = (node, depth) => {
            most = Math.max(most, depth);
            for (const child of node.children) walk(child, depth + 1);
          };
          for (const node of render(text)) walk(node, 1);
          return most;
        };
        const texts = ["> ".repeat(5000) + "a", "- ".repeat(5000) + "a", "*a ".repeat(3000) + "b* ".repeat(3000)];
        return texts.map(deep);
        """,
    )
    assert max(depth) <= 40

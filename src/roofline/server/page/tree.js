// A conversation as a tree of messages. Plain data and functions over it: no DOM, no storage.
//
// A conversation: {id, title, created, updated, system, sampling, nodes, chosen}. `nodes` are in the order they came,
// {id, parent, role, text, attachments, ...}; the parent of a first message is null. `chosen` says for a message (or
// "root") which of its children the shown branch goes on with.

export const ROOT = "root";
const TITLE = 60;

export const newId = () => {
  const bytes = crypto.getRandomValues(new Uint8Array(12)); // randomUUID is missing over plain HTTP
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
};

export function newConversation({ system = "", sampling = {} } = {}) {
  const now = Date.now();
  return { id: newId(), title: "", created: now, updated: now, system, sampling: { ...sampling }, nodes: [], chosen: {} };
}

export const nodeOf = (conversation, id) => conversation.nodes.find((node) => node.id === id) ?? null;

export const childrenOf = (conversation, parent) => conversation.nodes.filter((node) => node.parent === parent);

/** The messages of the shown branch, first to last. */
export function path(conversation) {
  const children = new Map();
  for (const node of conversation.nodes) {
    if (!children.has(node.parent)) children.set(node.parent, []);
    children.get(node.parent).push(node);
  }
  const result = [];
  let parent = null;
  for (;;) {
    const options = children.get(parent);
    if (!options) return result;
    const wish = conversation.chosen[parent ?? ROOT];
    const node = options.find((option) => option.id === wish) ?? options.at(-1);
    result.push(node);
    parent = node.id;
  }
}

/** The messages above and including `id`, first to last. */
export function pathTo(conversation, id) {
  const nodes = new Map(conversation.nodes.map((node) => [node.id, node]));
  const result = [];
  for (let node = nodes.get(id); node; node = nodes.get(node.parent)) result.unshift(node);
  return result;
}

/** {index, count, previous, next} of a message among those with its parent. */
export function siblings(conversation, node) {
  const all = childrenOf(conversation, node.parent);
  const index = all.findIndex((each) => each.id === node.id);
  return { index, count: all.length, previous: all[index - 1] ?? null, next: all[index + 1] ?? null };
}

/** Adds a message below `parent` and shows its branch. */
export function add(conversation, parent, fields) {
  const node = { id: newId(), parent, attachments: [], created: Date.now(), status: "complete", ...fields };
  conversation.nodes.push(node);
  choose(conversation, node);
  if (!conversation.title && node.role === "user") conversation.title = titleOf(node);
  conversation.updated = Date.now();
  return node;
}

export function choose(conversation, node) {
  conversation.chosen[node.parent ?? ROOT] = node.id;
}

export function titleOf(node) {
  const text = (node.text || node.attachments[0]?.name || "").replace(/\s+/g, " ").trim();
  return text.length > TITLE ? `${text.slice(0, TITLE - 1).trimEnd()}…` : text;
}

/** What is sent for a message: its attached files in fences with their names, then its text. */
export function contentOf(node) {
  const files = node.attachments.map(({ name, text }) => {
    const longest = Math.max(2, ...(text.match(/`+/g) ?? []).map((run) => run.length));
    const fence = "`".repeat(longest + 1);
    return `${name}\n${fence}\n${text}${text.endsWith("\n") ? "" : "\n"}${fence}`;
  });
  return [...files, ...(node.text ? [node.text] : [])].join("\n\n");
}

/** The messages of a request whose answer will be below `id`. */
export function messagesFor(conversation, id) {
  const system = conversation.system.trim();
  return [
    ...(system ? [{ role: "system", content: system }] : []),
    // An answer without a word, as of a failed request, would be refused or misread.
    ...pathTo(conversation, id).filter((node) => node.role === "user" || node.text)
      .map((node) => ({ role: node.role, content: contentOf(node) })),
  ];
}

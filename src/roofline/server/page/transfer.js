// Conversations as files: what is exported, and the checks that an imported file passes before it is kept.

import { checkedSampling } from "./settings.js";
import { newId } from "./tree.js";

const FORMAT = "roofline-chat";
const VERSION = 1;
export const MOST_FILE_BYTES = 32 * 1024 * 1024;
const MOST_NODES = 20000;
const MOST_TEXT = 4 * 1024 * 1024;
const STATUS = ["complete", "stopped", "failed"];
const REASONS = ["stop", "length"];

export const exported = (conversations) =>
  JSON.stringify({ format: FORMAT, version: VERSION, exported: new Date().toISOString(), conversations }, null, 1);

/** The conversations of an exported file, under new ids. Raises an Error with a sentence that names the place. */
export function imported(text) {
  let content;
  try {
    content = JSON.parse(text);
  } catch {
    throw new Error("The file is not JSON.");
  }
  if (content?.format !== FORMAT) throw new Error("The file is no export of this page.");
  if (content.version !== VERSION) {
    throw new Error(`The file is of version ${String(content.version).slice(0, 20)}; this page reads version ${VERSION}.`);
  }
  const list = array(content.conversations, "conversations", 10000);
  return list.map((each, i) => conversation(each, `conversations[${i}]`));
}

function conversation(value, place) {
  object(value, place);
  const nodes = [];
  const ids = new Map([[null, null]]); // in the file -> here
  array(value.nodes, `${place}.nodes`, MOST_NODES).forEach((each, i) => {
    const node = message(each, `${place}.nodes[${i}]`, ids);
    ids.set(each.id, node.id);
    nodes.push(node);
  });
  const chosen = {};
  for (const [parent, child] of Object.entries(object(value.chosen ?? {}, `${place}.chosen`))) {
    const [from, to] = [parent === "root" ? "root" : ids.get(parent), ids.get(child)];
    if (from && to) chosen[from] = to;
  }
  let sampling;
  try {
    sampling = checkedSampling(value.sampling ?? {});
  } catch (error) {
    throw new Error(`${place}.sampling: ${error.message}`);
  }
  return {
    id: newId(), title: string(value.title ?? "", `${place}.title`).slice(0, 120), created: time(value.created),
    updated: time(value.updated), system: string(value.system ?? "", `${place}.system`), sampling, nodes, chosen,
  };
}

function message(value, place, ids) {
  object(value, place);
  if (typeof value.id !== "string" || ids.has(value.id)) throw new Error(`${place}.id is missing or there twice.`);
  const parent = value.parent ?? null;
  if (!ids.has(parent)) throw new Error(`${place}.parent names no earlier message.`);
  if (value.role !== "user" && value.role !== "assistant") throw new Error(`${place}.role is neither user nor assistant.`);
  const attachments = array(value.attachments ?? [], `${place}.attachments`, 100).map((file, i) => {
    const where = `${place}.attachments[${i}]`;
    object(file, where);
    return { name: string(file.name, `${where}.name`).replace(/[\r\n]/g, " ").slice(0, 120), text: string(file.text, `${where}.text`) };
  });
  const status = STATUS.includes(value.status) ? value.status : value.status === "running" ? "stopped" : "complete";
  const error = status === "failed" && typeof value.error?.message === "string"
    ? { kind: "server", message: value.error.message.slice(0, 2048), retryAfter: null } : null;
  const node = { id: newId(), parent: ids.get(parent), role: value.role, text: string(value.text, `${place}.text`),
    attachments, created: time(value.created), status, error };
  if (value.thoughts) node.thoughts = string(value.thoughts, `${place}.thoughts`);
  if (REASONS.includes(value.reason)) node.reason = value.reason;
  if (typeof value.model === "string") node.model = value.model.slice(0, 256);
  for (const name of ["speed", "firstToken"]) if (isCount(value[name])) node[name] = value[name];
  const usage = value.usage ?? {};
  if (["prompt", "completion", "cached"].every((name) => isCount(usage[name]))) {
    node.usage = { prompt: usage.prompt, completion: usage.completion, cached: usage.cached };
  }
  return node;
}

const isCount = (value) => typeof value === "number" && Number.isFinite(value) && value >= 0;
const time = (value) => (isCount(value) ? value : Date.now());

function object(value, place) {
  if (typeof value !== "object" || value === null || Array.isArray(value)) throw new Error(`${place} is not an object.`);
  return value;
}

function array(value, place, most) {
  if (!Array.isArray(value)) throw new Error(`${place} is not a list.`);
  if (value.length > most) throw new Error(`${place} has more than ${most} entries.`);
  return value;
}

function string(value, place) {
  if (typeof value !== "string") throw new Error(`${place} is not a text.`);
  if (value.length > MOST_TEXT) throw new Error(`${place} has more than ${MOST_TEXT} characters.`);
  return value;
}

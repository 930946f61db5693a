// The dialog of a conversation's settings: system prompt and sampling. Empty fields leave the server's defaults.

import { byId, element } from "./dom.js";

// name of the request's field: [label, lowest, highest, step, meaning]; the server checks again.
const NUMBERS = {
  temperature: ["Temperature", 0, 2, 0.05, "0 takes the most likely token"],
  top_p: ["Top-p", 0.01, 1, 0.01, "Smallest set of tokens with this probability"],
  top_k: ["Top-k", 0, 100000, 1, "The k most likely tokens; 0 is all"],
  min_p: ["Min-p", 0, 1, 0.01, "Least share of the most likely one's probability"],
  max_tokens: ["Longest answer", 1, 10000000, 1, "In tokens; empty is what fits"],
  seed: ["Seed", 0, Number.MAX_SAFE_INTEGER, 1, "The same seed, the same answer"],
  repetition_penalty: ["Repetition penalty", 0.1, 10, 0.05, "1 is none"],
  presence_penalty: ["Presence penalty", -2, 2, 0.1, "0 is none"],
  frequency_penalty: ["Frequency penalty", -2, 2, 0.1, "0 is none"],
};
const MOST_STOPS = 16;
const DEFAULTS = "roofline-chat-defaults";
// As `roofline chat` samples: at the API's temperature of 1 small models talk nonsense.
const FIRST = { temperature: 0.7, top_p: 0.9 };

/** {system, sampling} that new conversations begin with: what was set last. */
export function defaults() {
  try {
    const { system, sampling } = JSON.parse(localStorage.getItem(DEFAULTS) ?? "{}");
    return { system: typeof system === "string" ? system : "", sampling: checkedSampling(sampling ?? FIRST) };
  } catch {
    return { system: "", sampling: { ...FIRST } };
  }
}

/** Whether a conversation has other settings than a first one. */
export function isSet({ system, sampling }) {
  const names = new Set([...Object.keys(sampling), ...Object.keys(FIRST)]);
  return Boolean(system.trim()) || [...names].some((name) => sampling[name] !== FIRST[name]);
}

/** The sampling settings among `values`; others raise an Error with a sentence. */
export function checkedSampling(values) {
  if (typeof values !== "object" || values === null || Array.isArray(values)) throw new Error("is not an object");
  const result = {};
  for (const [name, value] of Object.entries(values)) {
    if (name === "stop") {
      const texts = Array.isArray(value) && value.length <= MOST_STOPS && value.every((each) => typeof each === "string");
      if (!texts) throw new Error(`stop is not a list of at most ${MOST_STOPS} texts`);
      if (value.length) result.stop = [...value];
      continue;
    }
    if (!Object.hasOwn(NUMBERS, name)) throw new Error(`${name.slice(0, 40)} is not a setting`);
    const problem = problemOf(name, value);
    if (problem) throw new Error(problem);
    result[name] = value;
  }
  return result;
}

function problemOf(name, value) {
  const [label, lowest, highest, step] = NUMBERS[name];
  if (typeof value !== "number" || !Number.isFinite(value)) return `${label} is not a number.`;
  if (value < lowest || value > highest) return `${label} is from ${lowest} to ${highest}.`;
  return step === 1 && !Number.isInteger(value) ? `${label} is a whole number.` : null;
}

export class Settings {
  /** saved(system, sampling) */
  constructor(saved) {
    this.dialog = byId("settings-dialog");
    this.system = byId("system");
    this.stop = byId("stop-strings");
    this.problem = byId("settings-problem");
    this.fields = new Map();
    for (const [name, [label, lowest, highest, step, meaning]] of Object.entries(NUMBERS)) {
      const id = `setting-${name}`;
      const field = element("input", { id, inputmode: step === 1 ? "numeric" : "decimal", autocomplete: "off",
        placeholder: "default", "aria-describedby": `${id}-note` });
      this.fields.set(name, field);
      byId("numbers").append(element("div", { class: "field" }, element("label", { for: id }, label), field,
        element("small", { id: `${id}-note` }, meaning)));
    }
    byId("settings-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.save(saved);
    });
    byId("settings-reset").addEventListener("click", () => this.fill({ system: "", sampling: {} }));
    byId("settings-cancel").addEventListener("click", () => this.dialog.close());
  }

  open(conversation) {
    this.fill(conversation);
    this.dialog.showModal();
  }

  fill({ system, sampling }) {
    this.problem.textContent = "";
    this.system.value = system;
    this.stop.value = (sampling.stop ?? []).map((text) => text.replaceAll("\n", "\\n")).join("\n");
    for (const [name, field] of this.fields) {
      field.value = sampling[name] ?? "";
      field.removeAttribute("aria-invalid");
    }
  }

  save(saved) {
    const sampling = {};
    for (const [name, field] of this.fields) {
      const text = field.value.trim().replace(",", ".");
      const problem = text ? problemOf(name, Number(text)) : null;
      field.setAttribute("aria-invalid", String(Boolean(problem)));
      if (problem) {
        this.problem.textContent = problem;
        field.focus();
        return;
      }
      if (text) sampling[name] = Number(text);
    }
    const stops = this.stop.value.split("\n").filter(Boolean).map((text) => text.replaceAll("\\n", "\n"));
    if (stops.length > MOST_STOPS) {
      this.problem.textContent = `There can be at most ${MOST_STOPS} stop strings.`;
      this.stop.focus();
      return;
    }
    if (stops.length) sampling.stop = stops;
    const system = this.system.value;
    try {
      localStorage.setItem(DEFAULTS, JSON.stringify({ system, sampling }));
    } catch {
      // It holds for this conversation then.
    }
    this.dialog.close();
    saved(system, sampling);
  }
}

// The live strip: figures of the server, read from /stats, and the time to the first token of the last answer.

import { stats } from "./api.js";
import { byId } from "./dom.js";
import { figure, seconds } from "./message.js";

const OFTEN = 1000; // milliseconds while an answer runs
const SELDOM = 5000;

export class Strip {
  constructor() {
    this.before = null; // the last reading: {at, engine}
    this.busy = false;
    this.failures = 0;
    document.addEventListener("visibilitychange", () => this.again());
    this.again();
  }

  setBusy(busy) {
    if (busy === this.busy) return;
    this.busy = busy;
    this.again();
  }

  /** Shows what was measured here of an answer that has ended. */
  setAnswer({ firstToken, speed }) {
    show("first-token", firstToken ? seconds(firstToken) : "–");
    this.speed = speed;
    if (this.failures) this.showWithoutServer();
  }

  /** Reads now, and then every so often; nothing while nobody sees it. */
  again() {
    clearTimeout(this.timer);
    if (!document.hidden) this.read();
  }

  async read() {
    const turn = (this.turn = (this.turn ?? 0) + 1);
    try {
      const reading = await stats(AbortSignal.timeout(10_000));
      this.failures = 0;
      this.show(reading);
    } catch (error) {
      this.failures += 1;
      this.before = null;
      this.why = error.kind === "key" || error.status === 403 ? "The key does not open the server's figures"
        : "The server's figures cannot be read";
      this.showWithoutServer();
    }
    if (turn !== this.turn) return;
    const pause = (this.busy ? OFTEN : SELDOM) * Math.min(6, 1 + this.failures);
    this.timer = setTimeout(() => this.again(), pause);
  }

  showWithoutServer() {
    for (const name of ["roof", "queue", "cache"]) show(name, "–", { title: this.why });
    show("rate", this.speed ? figure(this.speed) : "–", { title: `Of the last answer. ${this.why}` });
  }

  show({ engine, queued }) {
    const now = { at: performance.now(), engine };
    const { before } = this;
    const since = (name) => Math.max(0, engine[name] - before.engine[name]);
    let rate = null;
    let share = engine.share_of_roof;
    let when = "since the server started";
    if (before && before.engine.pid === engine.pid) {
      rate = since("generated_tokens") / ((now.at - before.at) / 1000);
      const priced = since("priced_seconds");
      if (priced > 0) {
        share = Math.min(1, since("limit_seconds") / priced / engine.correction);
        when = "now";
      }
    }
    this.before = now;
    const average = engine.decode_tokens_per_second;
    show("rate", rate ? figure(rate) : engine.running ? "…" : "0",
      { title: `Tokens a second of all answers; ${figure(average)} on average since the server started` });
    show("roof", share === null ? "–" : percent(share),
      { title: share === null ? "The roofs of this chip are not measured" : `Share of the roof ${when}`, level: share });
    show("queue", String(Math.max(queued, engine.waiting)),
      { title: `Requests that wait; answers being computed: ${engine.running}` });
    const used = engine.pages_total ? engine.pages_used / engine.pages_total : 0;
    const hits = engine.prefix_queries ? ` ${percent(engine.prefix_hits / engine.prefix_queries)} of prompt tokens were found in it.` : "";
    show("cache", percent(used), { title: `${engine.pages_used.toLocaleString("en")} of ${engine.pages_total.toLocaleString("en")} pages.${hits}`,
      level: used });
  }
}

const percent = (value) => (value > 0 && value < 0.1 ? `${(100 * value).toFixed(1)} %` : `${Math.round(100 * value)} %`);

function show(name, text, { title, level } = {}) {
  const cell = byId(`strip-${name}`);
  cell.querySelector("dd").textContent = text;
  if (title !== undefined) cell.title = title;
  const bar = cell.querySelector(".level");
  if (bar) bar.style.transform = `scaleX(${Math.min(1, Math.max(0, level ?? 0))})`;
}

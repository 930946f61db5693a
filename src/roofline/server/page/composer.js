// The field that messages are written in, and the files that go with them.

import { readFiles } from "./attachments.js";
import { byId, element, icon, iconButton, toast } from "./dom.js";
import { size } from "./message.js";

export class Composer {
  /** actions: send(text, attachments) -> whether it was taken; stop(); editLast(). */
  constructor(actions) {
    this.actions = actions;
    this.area = byId("text");
    this.files = byId("files");
    this.button = byId("send");
    this.attachments = [];
    this.busy = false;
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.busy) this.actions.stop();
      else this.send();
    });
    this.area.addEventListener("keydown", (event) => this.pressed(event));
    this.area.addEventListener("input", () => this.fit());
    this.area.addEventListener("paste", (event) => this.take(event, event.clipboardData));
    this.connectFiles();
    this.setBusy(false);
  }

  connectFiles() {
    const input = byId("file-input");
    byId("attach").addEventListener("click", () => input.click());
    input.addEventListener("change", async () => {
      await this.attach([...input.files]);
      input.value = "";
    });
    const zone = document.body;
    const carriesFiles = (event) => event.dataTransfer?.types.includes("Files");
    zone.addEventListener("dragover", (event) => {
      if (!carriesFiles(event)) return;
      event.preventDefault();
      zone.classList.add("dragging");
    });
    zone.addEventListener("dragleave", (event) => event.relatedTarget || zone.classList.remove("dragging"));
    zone.addEventListener("drop", (event) => {
      zone.classList.remove("dragging");
      if (carriesFiles(event)) this.take(event, event.dataTransfer);
    });
  }

  take(event, transfer) {
    if (!transfer?.files.length) return;
    event.preventDefault();
    this.attach([...transfer.files]);
  }

  async attach(files) {
    const { attachments, problems } = await readFiles(files, this.attachments);
    this.attachments.push(...attachments);
    this.showFiles();
    for (const problem of problems) toast(problem, { seconds: 10 });
    this.area.focus();
  }

  showFiles() {
    this.files.replaceChildren(...this.attachments.map((file) => element("li", { class: "chip" }, icon("file"),
      element("span", {}, file.name), element("small", {}, size(file.text)),
      iconButton("close", `Remove ${file.name}`, () => {
        this.attachments = this.attachments.filter((each) => each !== file);
        this.showFiles();
        this.area.focus();
      }))));
    this.files.hidden = !this.attachments.length;
    this.enable();
  }

  pressed(event) {
    if (event.isComposing) return;
    const byTouch = matchMedia("(pointer: coarse)").matches; // Enter is the only way to a new line there
    if (event.key === "Enter" && !event.shiftKey && !byTouch) {
      event.preventDefault();
      if (!this.busy) this.send();
    } else if (event.key === "ArrowUp" && !this.area.value && !this.attachments.length && !this.busy) {
      event.preventDefault();
      this.actions.editLast();
    }
  }

  send() {
    const text = this.area.value.trim();
    if (!text && !this.attachments.length) return;
    if (!this.actions.send(text, this.attachments)) return;
    this.area.value = "";
    this.attachments = [];
    this.showFiles();
    this.fit();
  }

  /** While an answer runs, the button stops it. */
  setBusy(busy) {
    this.busy = busy;
    const label = busy ? "Stop the answer" : "Send the message";
    this.button.replaceChildren(icon(busy ? "stop" : "send"));
    this.button.setAttribute("aria-label", label);
    this.button.title = busy ? `${label} (Esc)` : `${label} (Enter)`;
    this.enable();
  }

  enable() {
    this.button.disabled = !this.busy && !this.area.value.trim() && !this.attachments.length;
  }

  /** As high as its text, up to a third of the window. */
  fit() {
    this.enable();
    this.area.style.height = "auto";
    this.area.style.height = `${Math.min(this.area.scrollHeight, Math.max(120, innerHeight / 3))}px`;
  }
}

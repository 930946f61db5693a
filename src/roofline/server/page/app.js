// Puts the parts of the page together.

import { models } from "./api.js";
import { Chat } from "./chat.js";
import { Composer } from "./composer.js";
import { announce, byId, element, icon, toast } from "./dom.js";
import { askForKey } from "./key.js";
import { showModels } from "./model.js";
import { Settings, defaults, isSet } from "./settings.js";
import { Sidebar } from "./sidebar.js";
import { Store } from "./store.js";
import { Strip } from "./strip.js";
import { ICON, SAYS, applyTheme, nextTheme, theme } from "./theme.js";
import { Thread } from "./thread.js";
import { MOST_FILE_BYTES, exported, imported } from "./transfer.js";
import { path } from "./tree.js";

applyTheme();
const MOST_SYSTEM = 8192; // characters of a system prompt in a link
const RETRY = 3000; // milliseconds until the server is asked again whether it is there

async function start() {
  const strip = new Strip();
  const store = await Store.open({ changed: () => listChanged(), problem: (sentence) => showBanner(sentence) });
  const chat = new Chat(store, { shown: () => shown(), changed: (node) => thread.changed(node), needsKey: askForKey,
    measured: (node) => strip.setAnswer(node) });
  const thread = new Thread({
    edit: (node, text) => {
      chat.edit(node, text);
      composer.area.focus();
    },
    again: (node) => chat.again(node),
    retry: (node) => chat.retry(node),
    choose: (node, label) => {
      chat.choose(node);
      byId("messages").querySelector(`[data-id="${node.id}"] [aria-label="${label}"]`)?.focus();
    },
  });
  const composer = new Composer({ stop: () => chat.stop(), editLast: () => editLast(),
    send: (text, attachments) => {
      thread.toEnd();
      const taken = chat.send(text, attachments);
      if (!taken && !chat.busy) toast("There is no model to answer yet. The page goes on trying to reach the server.");
      return taken;
    } });
  const sidebar = new Sidebar({
    create: () => create(),
    open: async (id) => {
      if (!(await chat.open(id))) toast("This conversation is not there any more.");
      composer.area.focus();
    },
    remove: (id) => remove(id),
    rename: (id, title) => rename(id, title),
  });
  const settings = new Settings((system, sampling) => {
    Object.assign(chat.conversation, { system, sampling });
    if (chat.conversation.nodes.length) chat.save(chat.conversation);
    shown();
    toast("The settings hold for this conversation, and for new ones.");
  });

  function shown() {
    const { conversation, busy } = chat;
    thread.show(conversation, busy);
    composer.setBusy(busy);
    document.title = `${conversation.title || "New chat"} · Roofline`;
    byId("settings").classList.toggle("changed", isSet(conversation));
    if (conversation.nodes.length) location.replace(`#${conversation.id}`);
    else if (location.hash) history.replaceState(null, "", location.pathname + location.search);
    listChanged();
  }

  async function listChanged() {
    strip.setBusy(chat.running.size > 0);
    sidebar.show(store.list(), chat.conversation.id, chat.running);
    // Another tab may have gone on with the conversation that is open here.
    const { conversation } = chat;
    const row = store.summaries.get(conversation.id);
    if (row && row.updated > conversation.updated && !chat.busy) await chat.open(conversation.id);
  }

  function create() {
    chat.start(defaults());
    composer.area.focus();
  }

  function editLast() {
    const last = path(chat.conversation).findLast((node) => node.role === "user");
    if (last) thread.edit(last);
  }

  async function remove(id) {
    const conversation = await chat.remove(id);
    if (id === chat.conversation.id) create();
    if (!conversation) return;
    const title = conversation.title || "Untitled";
    announce(`Deleted ${title}`);
    toast(`Deleted “${title}”.`, { label: "Undo", seconds: 10, action: () => chat.restore(conversation) });
  }

  async function rename(id, title) {
    const own = id === chat.conversation.id ? chat.conversation : chat.running.get(id)?.conversation;
    const conversation = own ?? (await store.get(id));
    if (conversation && conversation.title !== title) {
      conversation.title = title;
      await store.put(conversation);
      if (own) shown();
    } else listChanged();
  }

  function connectButtons() {
    const button = byId("theme");
    const reflect = (value) => {
      button.replaceChildren(icon(ICON[value]));
      button.setAttribute("aria-label", SAYS[value]);
      button.title = SAYS[value];
    };
    reflect(theme());
    button.addEventListener("click", () => reflect(nextTheme()));
    byId("settings").addEventListener("click", () => settings.open(chat.conversation));
    byId("export").addEventListener("click", () => exportAll(store, chat));
    const input = byId("import-input");
    byId("import").addEventListener("click", () => input.click());
    input.addEventListener("change", async () => {
      const [file] = input.files;
      input.value = "";
      if (file) await importFile(file, store, chat);
    });
    const icons = { menu: "menu", attach: "attach", settings: "settings", jump: "down", new: "plus", export: "export",
      import: "import" };
    for (const [id, name] of Object.entries(icons)) byId(id).prepend(icon(name));
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && chat.busy && !document.querySelector("dialog[open]")) chat.stop();
    });
    for (const suggestion of document.querySelectorAll("#suggestions button")) {
      suggestion.addEventListener("click", () => {
        composer.area.value = suggestion.textContent;
        composer.fit();
        composer.area.focus();
      });
    }
  }

  connectButtons();
  if (!store.lasting) {
    showBanner("This browser keeps nothing for this page: conversations are gone when the tab is closed. Export what you need.");
  }
  const wish = location.hash.slice(1); // a conversation that was open when the page was left
  const system = new URLSearchParams(location.search).get("system"); // of a link: for the conversation that it opens
  chat.start(system ? { ...defaults(), system: system.slice(0, MOST_SYSTEM) } : defaults());
  if (wish) await chat.open(wish);
  composer.area.focus();
  await connect(chat);
  strip.again();
}

/** Finds out what is served, and asks again until the server answers. */
async function connect(chat) {
  for (;;) {
    try {
      showModels(await models(), chat);
      byId("connection").hidden = true;
      return;
    } catch (error) {
      if (error.kind === "key" && (await askForKey(error.message))) continue;
      byId("connection").hidden = false;
      byId("connection").textContent = error.message;
    }
    await new Promise((resolve) => setTimeout(resolve, RETRY));
  }
}

async function exportAll(store, chat) {
  const conversations = [];
  for (const { id } of store.list()) {
    const conversation = chat.running.get(id)?.conversation ?? (await store.get(id));
    if (conversation) conversations.push(conversation);
  }
  if (!conversations.length) return toast("There is no conversation to export yet.");
  const address = URL.createObjectURL(new Blob([exported(conversations)], { type: "application/json" }));
  element("a", { href: address, download: `roofline-chat-${new Date().toISOString().slice(0, 10)}.json` }).click();
  setTimeout(() => URL.revokeObjectURL(address), 60_000);
  return toast(conversations.length === 1 ? "Exported one conversation." : `Exported ${conversations.length} conversations.`);
}

async function importFile(file, store, chat) {
  try {
    if (file.size > MOST_FILE_BYTES) throw new Error(`The file has more than ${MOST_FILE_BYTES >> 20} MB.`);
    const conversations = imported(await file.text());
    for (const conversation of conversations) await store.put(conversation);
    const kept = conversations.filter(({ id }) => store.summaries.has(id));
    if (kept.length) await chat.open(kept[0].id);
    toast(kept.length === 1 ? "Imported one conversation." : `Imported ${kept.length} conversations.`);
  } catch (error) {
    showBanner(`${file.name} was not imported. ${error.message}`);
  }
}

function showBanner(sentence) {
  const banner = byId("banner");
  banner.querySelector("span").textContent = sentence;
  banner.hidden = false;
  byId("banner-close").onclick = () => {
    banner.hidden = true;
    byId("text").focus();
  };
}

start();

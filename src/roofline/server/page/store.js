// Conversations kept in this browser: IndexedDB, bounded, with a list of summaries beside. Where the browser keeps
// nothing for the page, they stay in memory, and `lasting` is false.

const NAME = "roofline-chat";
export const MOST_CONVERSATIONS = 500;
export const MOST_CHARACTERS = 64 * 1024 * 1024; // of all conversations as JSON

const wait = (request) => new Promise((resolve, reject) => {
  request.onsuccess = () => resolve(request.result);
  request.onerror = () => reject(request.error);
});
const complete = (transaction) => new Promise((resolve, reject) => {
  transaction.oncomplete = () => resolve();
  transaction.onabort = () => reject(transaction.error);
  transaction.onerror = () => reject(transaction.error);
});

async function openDatabase() {
  const request = indexedDB.open(NAME, 1);
  request.onupgradeneeded = () => {
    request.result.createObjectStore("conversations", { keyPath: "id" });
    request.result.createObjectStore("summaries", { keyPath: "id" });
  };
  return wait(request);
}

export class Store {
  /** changed(): the list is another one now, perhaps by another tab. problem(sentence): something was not kept. */
  static async open({ changed, problem }) {
    const store = new Store();
    Object.assign(store, { changed, problem, summaries: new Map(), memory: new Map(), last: Promise.resolve() });
    try {
      store.database = await openDatabase();
      store.lasting = true;
    } catch {
      store.database = null;
      store.lasting = false;
    }
    await store.reload();
    store.channel = new BroadcastChannel(NAME);
    store.channel.onmessage = async () => {
      await store.reload();
      store.changed();
    };
    return store;
  }

  async reload() {
    if (!this.database) return;
    const rows = await wait(this.database.transaction("summaries").objectStore("summaries").getAll());
    this.summaries = new Map(rows.map((row) => [row.id, row]));
  }

  /** [{id, title, updated, size}], the latest first. */
  list() {
    return [...this.summaries.values()].sort((a, b) => b.updated - a.updated);
  }

  async get(id) {
    if (!this.database) return this.memory.get(id) ?? null;
    const conversation = await wait(this.database.transaction("conversations").objectStore("conversations").get(id));
    // What was running when its tab was closed does not run any more.
    for (const node of conversation?.nodes ?? []) if (node.status === "running") node.status = "failed";
    return conversation ?? null;
  }

  /** Keeps a conversation, or says through `problem` why it is not kept. Calls are done one after the other. */
  put(conversation) {
    const copy = structuredClone(conversation); // as it is now, whatever happens to it meanwhile
    this.last = this.last.then(() => this.write(copy));
    return this.last;
  }

  async write(conversation) {
    const { id, title, updated } = conversation;
    const size = JSON.stringify(conversation).length;
    const sentence = this.full(id, size);
    if (sentence) return this.problem(sentence);
    if (this.database) {
      try {
        const transaction = this.database.transaction(["conversations", "summaries"], "readwrite");
        transaction.objectStore("conversations").put(conversation);
        transaction.objectStore("summaries").put({ id, title, updated, size });
        await complete(transaction);
      } catch (error) {
        const full = error?.name === "QuotaExceededError";
        return this.problem(full
          ? "The browser has no room left for this page, so the latest messages are not kept. Delete or export conversations."
          : "The browser could not keep this conversation. Export it if you need it.");
      }
    } else this.memory.set(id, conversation);
    this.summaries.set(id, { id, title, updated, size });
    this.changed();
    this.channel.postMessage("changed");
    return undefined;
  }

  full(id, size) {
    let total = size;
    for (const row of this.summaries.values()) if (row.id !== id) total += row.size;
    const what = "so the latest messages are not kept. Delete or export conversations.";
    if (!this.summaries.has(id) && this.summaries.size >= MOST_CONVERSATIONS) {
      return `This page keeps at most ${MOST_CONVERSATIONS} conversations, ${what}`;
    }
    return total > MOST_CHARACTERS ? `This page keeps at most ${MOST_CHARACTERS >> 20} MB, ${what}` : null;
  }

  async remove(id) {
    await this.last;
    if (this.database) {
      const transaction = this.database.transaction(["conversations", "summaries"], "readwrite");
      transaction.objectStore("conversations").delete(id);
      transaction.objectStore("summaries").delete(id);
      await complete(transaction);
    }
    this.memory.delete(id);
    this.summaries.delete(id);
    this.changed();
    this.channel.postMessage("changed");
  }
}

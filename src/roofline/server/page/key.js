// The dialog that asks for the API key. The key stays in this tab's session storage.

import { ApiError, key, models } from "./api.js";
import { byId } from "./dom.js";

let pending = null; // the dialog's answer, while it is open

/** Whether there is a key now that the server takes. Several askers share one dialog. */
export function askForKey(reason) {
  pending ??= ask(reason).finally(() => {
    pending = null;
  });
  return pending;
}

function ask(reason) {
  const [dialog, form, field, problem] = ["key-dialog", "key-form", "key", "key-problem"].map(byId);
  const cancel = byId("key-cancel");
  problem.textContent = key.get() ? reason : "";
  field.value = "";
  dialog.showModal();
  return new Promise((resolve) => {
    let taken = false;
    const submit = async (event) => {
      event.preventDefault();
      const before = key.get();
      key.set(field.value.trim());
      try {
        await models();
        taken = true;
        dialog.close();
      } catch (error) {
        if (before) key.set(before);
        else key.forget();
        problem.textContent = error instanceof ApiError && error.kind === "key" ? "The server does not take this key." : error.message;
        field.select();
      }
    };
    form.addEventListener("submit", submit);
    cancel.onclick = () => dialog.close();
    dialog.addEventListener("close", () => {
      form.removeEventListener("submit", submit);
      resolve(taken);
    }, { once: true });
  });
}

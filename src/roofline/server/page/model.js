// Which of the served models answers: the one that a link names (/?model=NAME), else what was chosen where there are
// several, else the first one.

import { byId, element, toast } from "./dom.js";

const CHOSEN = "roofline-model"; // in localStorage

/** Shows the served models, of which there is at least one, and has the chosen one answer. */
export function showModels(models, chat) {
  const named = new URLSearchParams(location.search).get("model");
  if (named && !models.some(({ id }) => id === named)) {
    toast(`This server has no model “${named}”: ${models[0].id} answers.`);
  }
  const choose = (name) => {
    const model = models.find(({ id }) => id === name) ?? models[0];
    chat.model = model.id;
    byId("model").textContent = model.id;
    byId("model").title = model.max_model_len ? `${model.max_model_len.toLocaleString("en")} tokens of context` : "";
    return model.id;
  };
  const select = byId("models");
  select.replaceChildren(...models.map(({ id }) => element("option", { value: id }, id)));
  select.value = choose(named ?? remembered());
  select.hidden = models.length < 2;
  byId("model").classList.toggle("off-screen", !select.hidden);
  select.onchange = () => {
    history.replaceState(null, "", location.pathname + location.hash); // the link has been followed
    remember(choose(select.value));
  };
}

function remembered() {
  try {
    return localStorage.getItem(CHOSEN);
  } catch { // a browser that keeps nothing for this page
    return null;
  }
}

function remember(name) {
  try {
    localStorage.setItem(CHOSEN, name);
  } catch { // it is chosen until the tab is closed
  }
}

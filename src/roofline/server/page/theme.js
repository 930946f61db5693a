// Light, dark, or as the system has it. Set on the document before anything is drawn.

const NAME = "roofline-chat-theme";
const NEXT = { auto: "light", light: "dark", dark: "auto" };
export const SAYS = { auto: "Colours: as the system", light: "Colours: light", dark: "Colours: dark" };
export const ICON = { auto: "auto", light: "sun", dark: "moon" };

export function theme() {
  try {
    const stored = localStorage.getItem(NAME);
    return Object.hasOwn(NEXT, stored ?? "") ? stored : "auto";
  } catch {
    return "auto";
  }
}

export function applyTheme(value = theme()) {
  if (value === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = value;
}

/** The next of the three. */
export function nextTheme() {
  const value = NEXT[theme()];
  try {
    localStorage.setItem(NAME, value);
  } catch {
    // It holds until the page is left.
  }
  applyTheme(value);
  return value;
}

// Makes elements. Text of models and people becomes text nodes only: nothing here parses markup.

/** An element with attributes and children. Strings among the children are text; null and false are left out.
 *  `on` has event handlers, `class`, `data` and `aria` what their names say; true sets an attribute without a value. */
export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  fill(node, attributes);
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

/** An SVG element; numbers among the attributes become strings. */
export function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  fill(node, attributes);
  node.append(...children.flat());
  return node;
}

function fill(node, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "on") for (const [event, handler] of Object.entries(value)) node.addEventListener(event, handler);
    else if (name === "data") Object.assign(node.dataset, value);
    else if (name === "aria") for (const [key, part] of Object.entries(value)) node.setAttribute(`aria-${key}`, part);
    else node.setAttribute(name, value === true ? "" : value);
  }
}

/** The label of a key. */
export const key = (name) => el("kbd", { aria: { hidden: "true" } }, name);

/** The key as on a Latin keyboard, also with another layout (Cyrillic, say) or caps lock;
 *  digits by their place, since a French keyboard writes "&" where others write 1. Digits of a keypad come as they are. */
export function latin(event) {
  const { key: name, code = "" } = event;
  if (name.length > 1 || /^[0-9]$/.test(name)) return name;
  const digit = /^Digit([0-9])$/.exec(code);
  if (digit && !event.shiftKey && !event.getModifierState?.("AltGraph")) return digit[1];
  return (name.codePointAt(0) < 128 ? name : code.replace(/^(Key|Digit)/, "")).toLowerCase();
}

/** 128 random bits as hex. `crypto.randomUUID` is missing on pages served over plain HTTP from another machine. */
export function nonce() {
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** This loading of the page, and the one before in the same tab, if any: two tabs with one item must not write over each other. */
export const tab = nonce();
export const tabBefore = (() => {
  try {
    const before = sessionStorage.getItem("heedful.tab");
    sessionStorage.setItem("heedful.tab", tab);
    return before;
  } catch {
    return null; // forbidden
  }
})();

/** What the browser remembers between visits; without storage (private windows) it remembers until the page closes. */
const fallback = new Map();
export const memory = {
  get(name) {
    try {
      return JSON.parse(localStorage.getItem(`heedful.${name}`));
    } catch {
      return fallback.get(name) ?? null;
    }
  },
  set(name, value) {
    fallback.set(name, value);
    try {
      if (value === null) localStorage.removeItem(`heedful.${name}`);
      else localStorage.setItem(`heedful.${name}`, JSON.stringify(value));
    } catch {
      // Full or forbidden: `fallback` has it.
    }
  },
  /** Forgets everything with a name that begins with this. */
  forget(beginning) {
    const names = [...fallback.keys()];
    try {
      names.push(...Object.keys(localStorage).filter((name) => name.startsWith("heedful.")).map((name) => name.slice(8)));
    } catch {
      // Forbidden: there is nothing to forget.
    }
    for (const name of names) if (name.startsWith(beginning)) this.set(name, null);
  },
};

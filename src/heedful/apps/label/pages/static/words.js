// The interface in two languages. Every string is in words/en.json and words/zh.json under the same key.
import { memory } from "./dom.js";

let words = {};
export let language = "en";

/** Loads the words of the language that was chosen, else the project's, else the browser's. */
export async function loadWords(preferred) {
  const chosen = memory.get("language") ?? preferred ?? navigator.language;
  language = String(chosen).toLowerCase().startsWith("zh") ? "zh" : "en";
  document.documentElement.lang = language === "zh" ? "zh-CN" : "en";
  const reply = await fetch(`/static/words/${language}.json`);
  words = await reply.json();
}

/** The words for a key, with {name} replaced, and {name|one|many} by the singular or plural for that number. A missing key shows itself, so that it is noticed. */
export function t(name, values = {}) {
  return (words[name] ?? name)
    .replace(/\{(\w+)\|([^|}]*)\|([^}]*)\}/g, (_, field, one, many) => (String(values[field]) === "1" ? one : many))
    .replace(/\{(\w+)\}/g, (whole, field) => String(values[field] ?? whole));
}

/** True if there are words for a key. */
export const known = (name) => name in words;

/** The words for a name that the program uses, or the name itself. */
export const named = (prefix, name) => (known(`${prefix}_${name}`) ? t(`${prefix}_${name}`) : String(name ?? ""));

/** A number in the language's way; null is "n/a", as in the statistics for undefined values. */
export function number(value, digits = 0) {
  if (value === null || value === undefined) return t("not_available");
  return value.toLocaleString(language === "zh" ? "zh-CN" : "en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

/** A share as a percentage. */
export const percent = (value, digits = 1) => (value === null || value === undefined ? t("not_available") : `${number(100 * value, digits)} %`);

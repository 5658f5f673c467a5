// Parts of every page: the bar at the top, the language and theme switches, the live region, dialogs.
import { get, post, Refused, setCsrf, Unreachable } from "./api.js";
import { el, key, memory } from "./dom.js";
import { pause } from "./outbox.js";
import { known, language, loadWords, t } from "./words.js";

const PAGES = {
  work: ["/", ["owner", "annotator"]],
  stats: ["/stats", ["owner", "viewer"]],
  rounds: ["/rounds", ["owner", "viewer"]],
  labels: ["/labels", ["owner"]],
  people: ["/people", ["owner"]],
  instructions: ["/instructions", ["owner", "annotator", "viewer"]],
  import: ["/import", ["owner"]],
  export: ["/export", ["owner"]],
};
const page = document.body.dataset.page;
const live = document.getElementById("live");
const banner = document.getElementById("banner");

/** Announces a text to screen readers, also the same text twice. */
export function announce(text) {
  live.textContent = "";
  setTimeout(() => { live.textContent = text; }, 30);
}

/** A lasting line across the page: a problem and its fix. `null` removes it. */
export function showBanner(text, { kind = "bad", button = null } = {}) {
  banner.hidden = text === null;
  banner.className = `banner ${kind}`;
  banner.replaceChildren(...(text === null ? [] : [el("span", {}, text), ...(button ? [button] : [])]));
}

/** A short notice that disappears by itself: in the bar at the bottom, or above the page if there is no bar. */
export function toast(text, kind = "") {
  document.querySelector(".toast")?.remove();
  const bar = document.getElementById("missing");
  if (bar) {
    bar.textContent = text;
    bar.classList.toggle("calm", kind === "");
    announce(text);
    setTimeout(() => { if (bar.textContent === text) bar.textContent = ""; }, 5000);
    return;
  }
  const node = el("div", { class: `toast ${kind}`, aria: { hidden: "true" } }, text);
  document.body.append(node);
  announce(text);
  setTimeout(() => node.remove(), 5000);
}

/** Signs in from the cookie and draws the bar; null, with a message, if the role may not see the page. */
export async function start() {
  let me = null;
  while (me === null) {
    try {
      me = await get("/api/me");
    } catch (error) {
      if (error instanceof Refused && error.status === 401) {
        location.replace("/join");
        return null;
      }
      await loadWords().catch(() => {});
      if (!(error instanceof Unreachable)) {
        showBanner(said(error));
        return null;
      }
      offline(true);
      await pause(3);
    }
  }
  setCsrf(me.csrf);
  await loadWords(me.language);
  offline(false);
  drawTop(me);
  document.title = `${t(`page_${page}`)} · ${projectName(me)}`;
  drawFoot(me);
  if (page !== "work") document.getElementById("main").replaceChildren(el("h1", {}, t(`page_${page}`)));
  if (!PAGES[page][1].includes(me.role)) {
    document.getElementById("main").replaceChildren(el("p", { class: "card notice" }, t("not_for_role", { role: t(`role_${me.role}`) })));
    ready();
    return null;
  }
  return me;
}

export const projectName = (me) => me.project?.name ?? me.project ?? "heedful";

/** The banner for a lost connection. `kept` is the message about unsent requests. */
export function offline(is, kept = t("offline")) {
  const again = el("button", { type: "button", on: { click: () => window.dispatchEvent(new Event("heedful:retry")) } }, t("try_now"));
  showBanner(is ? kept : null, { kind: "warn", button: again });
}

function drawTop(me) {
  const links = Object.entries(PAGES)
    .filter(([, [, roles]]) => roles.includes(me.role))
    .map(([name, [path]]) => el("a", { href: path, aria: name === page ? { current: "page" } : {} }, t(`page_${name}`)));
  const parts = [
    el("a", { href: "#main", class: "jump" }, t("jump")),
    el("strong", { class: "project", title: me.name }, projectName(me)),
    links.length > 1 && el("nav", { aria: { label: t("pages") } }, links),
    el("div", { id: "progress", class: "progress" }),
    el("div", { class: "switches" }, languageSwitch(), themeSwitch(), el("span", { id: "extras" })),
  ];
  document.getElementById("top").replaceChildren(...parts.filter(Boolean));
  document.getElementById("top").querySelector("nav a[aria-current]")?.scrollIntoView({ block: "nearest", inline: "center" });
}

/** Ends the session on the server and in this browser. */
export async function leave() {
  if ((await attempt(() => post("/api/leave", {}))) === null) return;
  memory.forget("draft."); // the server has them; do not show them to the next person
  location.assign("/join");
}

function drawFoot(me) {
  document.getElementById("foot").replaceChildren(
    el("span", {}, `${me.name} · ${t(`role_${me.role}`)}`),
    el("button", { type: "button", class: "quiet small", id: "leave", on: { click: leave } }, t("leave")));
}

/** Two buttons that every page has, also the one for signing in. `changed` shows the page in the other language. */
export function languageSwitch(changed = () => location.reload()) {
  const other = language === "zh" ? "en" : "zh";
  const change = () => {
    memory.set("language", other);
    changed();
  };
  return el("button", { type: "button", class: "quiet", id: "language", lang: other === "zh" ? "zh-CN" : "en", on: { click: change } }, other === "zh" ? "中文" : "English");
}

export function themeSwitch() {
  const root = document.documentElement;
  const dark = () => (root.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  const button = el("button", { type: "button", class: "quiet", id: "theme" });
  const draw = () => {
    button.textContent = dark() ? "☀" : "☾";
    button.setAttribute("aria-label", t(dark() ? "theme_light" : "theme_dark"));
    button.title = button.getAttribute("aria-label");
  };
  button.addEventListener("click", () => {
    root.dataset.theme = dark() ? "light" : "dark";
    memory.set("theme", root.dataset.theme);
    draw();
  });
  draw();
  return button;
}

/** A modal dialog with a form: `fields` are its content, `confirm` its button (null: there is only Close) and
 *  `ready(form)` what that does. Escape closes it. */
export function ask(title, fields, confirm = null, ready = null) {
  const form = el("form", { method: "dialog" }, el("h2", { id: "asked" }, title), fields, el("div", { class: "row end" },
    el("button", { type: "button", class: confirm ? "quiet" : "main", on: { click: () => dialog.close() } }, t(confirm ? "cancel" : "close"), " ", key("Esc")),
    confirm && el("button", { type: "submit", class: "main" }, confirm, " ", key("Enter"))));
  const dialog = el("dialog", { aria: { labelledby: "asked" } }, form);
  const before = document.activeElement;
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (!confirm || ready(form) !== false) dialog.close();
  });
  dialog.addEventListener("close", () => {
    dialog.remove();
    before?.focus?.();
  });
  document.body.append(dialog);
  dialog.showModal();
  return dialog;
}

/** The page is ready; until then screen readers wait (aria-busy). */
export const ready = () => document.getElementById("main").setAttribute("aria-busy", "false");

/** The server's message, translated if it has a code; `otherwise` if there is none. */
export function said(error, otherwise = t("unreachable")) {
  const { code, values } = error.body ?? {};
  if (code && known(`said_${code}`)) return t(`said_${code}`, values);
  return (error.body !== null && error.message) || otherwise; // without a reply, the browser's own message does not help
}

/** Runs a function that calls the server; an error is shown in the banner, and null returned. */
export async function attempt(action, { keepBanner = false } = {}) {
  try {
    const result = await action();
    if (!keepBanner) showBanner(null);
    return result;
  } catch (error) {
    if (error instanceof Refused && error.status === 401) location.assign("/join");
    else if (error instanceof Refused) showBanner(said(error, t("refused", { status: error.status })));
    else if (error instanceof Unreachable) showBanner(said(error));
    else throw error;
    return null;
  }
}

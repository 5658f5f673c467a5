// Signing in: the link's token is behind the #, so it is in no log and no Referer; it is removed from the address at once.
// A signed-in browser continues as that person: links work once, and a link from another site comes without the cookie.
import { get, post, Refused, Unreachable } from "./api.js";
import { el } from "./dom.js";
import { languageSwitch, ready, said, showBanner, themeSwitch } from "./shell.js";
import { loadWords, t } from "./words.js";

const main = document.getElementById("main");
let shown = ["", null]; // the link's token, and who is signed in
await drawTop();
await take();
window.addEventListener("hashchange", take); // a link opened in an open tab changes only the part behind the #
ready();

async function drawTop() {
  await loadWords();
  document.title = `${t("page_join")} · heedful`;
  document.getElementById("top").replaceChildren(el("strong", { class: "project" }, "heedful"), el("div", { class: "progress" }), el("div", { class: "switches" }, languageSwitch(translate), themeSwitch()));
}

/** Not by loading the page again: the token is no longer in its address. */
async function translate() {
  const typed = document.getElementById("token")?.value;
  await drawTop();
  showBanner(null);
  draw(...shown);
  if (typed) document.getElementById("token").value = typed;
  document.getElementById("language").focus();
}

async function take() {
  const token = location.hash.slice(1);
  history.replaceState(null, "", location.pathname);
  showBanner(null);
  const me = await signedIn();
  if (me !== null && !token) location.replace(home(me.role));
  else draw(token, me);
}

/** The person signed in with this browser; null if nobody, or if the server refuses (too many expired sessions, say). */
async function signedIn() {
  try {
    return await get("/api/me");
  } catch (error) {
    if (error instanceof Refused || error instanceof Unreachable) return null;
    throw error;
  }
}

function home(role) {
  return role === "viewer" ? "/stats" : "/";
}

function draw(given, me = null) {
  shown = [given, me];
  const box = el("input", { type: "text", id: "token", value: given, autocomplete: "off", spellcheck: "false", required: true });
  const button = el("button", { type: "submit", class: me ? null : "main" }, t(me ? "join_with_link" : "join"));
  const goOn = me && el("button", { type: "button", class: "main", on: { click: () => location.replace(home(me.role)) } }, t("join_go_on", { name: me.name }));
  const form = el("form", { class: "card joining notice", on: { submit: (event) => { event.preventDefault(); join(box.value, button); } } },
    el("h1", {}, t("join_title")), el("p", { class: "hint" }, me ? t("join_signed_in", { name: me.name }) : t(given ? "join_ready" : "join_need_link")),
    given ? null : el("label", { class: "field" }, el("span", {}, t("join_code")), box), el("div", { class: "row" }, goOn, button));
  main.replaceChildren(form);
  (goOn ?? (given ? button : box)).focus();
}

/** Only on a click: previews of links in chat programs open pages, and would use the link up. */
async function join(value, button) {
  button.disabled = true;
  try {
    const { role } = await post("/api/join", { token: value.trim().split("#").at(-1) });
    location.replace(home(role));
  } catch (error) {
    showBanner(said(error));
    button.disabled = false;
    if (error instanceof Refused) draw("");
  }
}

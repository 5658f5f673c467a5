// Signing in: the link's token is behind the #, so it is in no log and no Referer; it is taken out of the address at once.
import { post, Refused } from "./api.js";
import { el } from "./dom.js";
import { languageSwitch, ready, showBanner, themeSwitch } from "./shell.js";
import { loadWords, t } from "./words.js";

const main = document.getElementById("main");
await loadWords();
document.title = `${t("page_join")} · heedful`;
document.getElementById("top").replaceChildren(el("strong", { class: "project" }, "heedful"), el("div", { class: "progress" }), el("div", { class: "switches" }, languageSwitch(), themeSwitch()));
take();
window.addEventListener("hashchange", take); // a link opened in a tab that is here already changes only what is behind the #
ready();

function take() {
  const token = location.hash.slice(1);
  history.replaceState(null, "", location.pathname);
  showBanner(null);
  draw(token);
}

function draw(given) {
  const box = el("input", { type: "text", id: "token", value: given, autocomplete: "off", spellcheck: "false", required: true });
  const button = el("button", { type: "submit", class: "main" }, t("join"));
  const form = el("form", { class: "card joining notice", on: { submit: (event) => { event.preventDefault(); join(box.value, button); } } },
    el("h1", {}, t("join_title")), el("p", { class: "hint" }, t(given ? "join_ready" : "join_need_link")),
    given ? null : el("label", { class: "field" }, el("span", {}, t("join_code")), box), button);
  main.replaceChildren(form);
  (given ? button : box).focus();
}

/** Only on a click: previews of links in chat programs open pages, and would use the link up. */
async function join(value, button) {
  button.disabled = true;
  try {
    const { role } = await post("/api/join", { token: value.trim().split("#").at(-1) });
    location.replace(role === "viewer" ? "/stats" : "/");
  } catch (error) {
    showBanner(error instanceof Refused ? error.message : t("unreachable"));
    button.disabled = false;
    if (error instanceof Refused) draw("");
  }
}

// The page on which people label: takes an item, shows it, sends the decision, takes the next.
import { activeTime, idleTime } from "./active.js";
import { get, post, Refused, Unreachable } from "./api.js";
import { asText, isRaw, judgement, markScrolling, prompt, text, toggleRaw } from "./content.js";
import { criteria } from "./criteria.js";
import { el, key, latin, memory, nonce, tab, tabBefore } from "./dom.js";
import { outbox, pause } from "./outbox.js";
import { announce, ask, attempt, leave, offline, projectName, ready, said, showBanner, start, toast } from "./shell.js";
import { chat } from "./tasks/chat.js";
import { pair } from "./tasks/pair.js";
import { ranking } from "./tasks/ranking.js";
import { rating } from "./tasks/rating.js";
import { correction, demonstration, fit } from "./tasks/writing.js";
import { known, t } from "./words.js";

const TASKS = { pair, ranking, rating, demonstration, correction, chat };
const ITEM_FLAGS = ["personal-data", "unsafe", "broken"];
const SKIP_REASONS = ["unclear", "not-my-field", "cannot-decide", "other"];
const RENEW = 4 * 60_000; // ms between renewals of an item's lease (15 minutes by default)
const STILL_THERE = 10 * 60_000; // ms without activity after which a person counts as gone
const LOOK_AGAIN = 20; // seconds between looks for new items when there are none
const MOST_TABS = 8; // whose drafts this browser keeps
const MOST_TRIES = 4; // of a message that the server accepts but the model does not answer
const MOST_ABOUT = 120; // characters of a prompt that identify an item in a message

const main = document.getElementById("main");
const tabs = "BroadcastChannel" in window ? new BroadcastChannel("heedful") : null;
let me = null;
let out = null;
/** The item on the screen: `item`, its `view`, `flags`, `comment`, `before` and `activeBefore` (seconds of
 *  earlier visits), `shown` and `activeShown` (when), `changed` (somebody did something to it), `saved` (the server has that),
 *  `from` (the draft that it began with, as tab.save), `past` (that, and what that began with), `others` (what was written in other tabs). */
let now = null;
let sending = false;
/** The server has stopped because everything is labelled: no more requests. */
let over = false;
let draftTimer = 0;

/* ---- taking and showing an item ---- */

async function next() {
  if (over) return;
  const reply = await insist(() => get("/api/next"));
  if (reply !== null) show(reply);
}

/** Asks until there is a reply. Null, with a message, if the server refuses or could not answer `most` times. */
async function insist(action, most = Infinity) {
  for (let wait = 1, left = most; ; wait = Math.min(10, 2 * wait)) {
    try {
      const reply = await action();
      offline(false);
      return reply;
    } catch (error) {
      if (!(error instanceof Unreachable)) {
        await attempt(() => { throw error; });
        return null;
      }
      if (error.body?.error && !error.body.loading) left -= 1;
      if (left === 0) {
        showBanner(t("not_answered", { reason: said(error) }));
        return null;
      }
      if (error.body?.loading) showBanner(t("model_loading"), { kind: "warn" });
      else offline(true, error.body?.error ? said(error) : t("offline"));
      await pause(Math.max(error.wait, error.body?.loading ? 1 : wait));
    }
  }
}

function show(reply) {
  clearTimeout(draftTimer);
  drawProgress(reply.progress);
  sending = false;
  if (!reply.item) return showNothing(reply);
  const item = { ...reply.item, redo: reply.redo };
  now = { item, flags: [], before: 0, activeBefore: 0, shown: performance.now(), activeShown: activeTime(), saved: true, from: item.draft_of, past: [], others: [...item.others ?? []] };
  now.comment = el("textarea", { class: "comment", rows: "2", dir: "auto", aria: { label: t("comment") }, placeholder: t("comment_placeholder"), on: { input: () => { fit(now.comment); changed(); } } });
  now.view = TASKS[item.task](item, { changed, request, submit });
  now.criteria = criteria(item.criteria, item.criteria.length ? [...now.view.body.querySelectorAll(".answer")] : [], { changed, done: () => document.getElementById("question").focus() });
  now.commentBox = el("section", { class: "comment-box", hidden: true }, now.comment);
  now.othersBox = el("section", { class: "card others", hidden: true, aria: { label: t("other_tabs") } });
  now.flagNote = el("span", { class: "flag-note" });
  main.className = `work task-${item.task}`;
  main.dataset.item = item.id;
  main.replaceChildren(
    el("div", { class: "task-line" }, el("h1", { id: "question", tabindex: "-1" }, t(`question_${item.task}`)), now.flagNote, rawButton(), instructionsButton()),
    instructionsPane(item),
    el("div", { class: "work-area" },
      item.task === "chat" ? null : promptParts(item.prompt),
      now.view.body, item.suggestion && suggestion(item.suggestion), now.commentBox, now.othersBox),
    el("section", { class: "bar", aria: { label: t("decide") } }, now.view.controls, actions()));
  restore(item);
  drawOthers();
  drawFlags();
  window.scrollTo(0, 0);
  markScrolling();
  const target = now.view.focus ?? document.getElementById("question");
  target.focus({ preventScroll: true });
  announce(t(`question_${item.task}`));
}

/** The prompt, and its beginning in a bar while the prompt is scrolled off the screen; a click scrolls back. */
function promptParts(said) {
  const card = el("section", { class: "card prompt", aria: { label: t("prompt") } }, el("h2", {}, t("prompt")), prompt(said));
  const button = el("button", { type: "button", hidden: true, tabindex: "-1", on: { click: () => window.scrollTo(0, 0) } }, el("b", {}, t("prompt")), el("span", { dir: "auto" }, excerpt(said)));
  new IntersectionObserver(([{ isIntersecting, boundingClientRect: box }]) => { button.hidden = isIntersecting || box.top > 0; }, { rootMargin: "-60px 0px 0px" }).observe(card);
  return [card, el("div", { class: "prompt-bar" }, button)];
}

function showNothing({ reason, why, count, seconds: left }) {
  now = null;
  main.className = "work";
  main.dataset.item = "";
  main.replaceChildren(el("section", { class: "card notice nothing" },
    el("h1", { id: "question", tabindex: "-1" }, t("nothing_left")),
    reason && el("p", {}, known(`why_${reason}`) ? t(`why_${reason}`, { n: count }) : why),
    el("div", { class: "row" },
      el("button", { type: "button", class: "main", on: { click: next } }, t("look_again")),
      el("button", { type: "button", on: { click: undo } }, t("undo"), " ", key("u")))));
  document.getElementById("question").focus({ preventScroll: true });
  if (reason === "closing") return showClosing(left);
  const looked = document.getElementById("question");
  return pause(LOOK_AGAIN).then(() => { if (now === null && looked.isConnected) next(); });
}

/** The server stops by itself; for some seconds the last label can be taken back, with no request in between. */
function showClosing(left) {
  const back = el("button", { type: "button", on: { click: undo } }, t("undo"), " ", key("u"));
  const end = () => {
    if (!back.isConnected) return; // it was taken back
    over = true;
    back.remove();
  };
  main.firstElementChild.replaceChildren(el("h1", { id: "question", tabindex: "-1" }, t("closing_title")), el("p", {}, t("why_closing")), el("div", { class: "row" }, back));
  setTimeout(end, Math.max(0, 1000 * left - 1000)); // before the server stops and can no longer answer
}

function actions() {
  const writes = now.item.task === "demonstration" || now.item.task === "correction";
  const quiet = (name, short, action, more = {}) => el("button", { type: "button", class: "quiet", ...more, on: { click: action } }, t(name), " ", key(short));
  return el("div", { class: "actions" },
    quiet("undo", "u", undo), now.item.redo && quiet("redo", "y", redo), quiet("skip", "s", skip), quiet("flag", "f", flag), quiet("comment", "c", openComment, { id: "comment-button" }),
    el("span", { class: "grow" }), el("span", { id: "missing", class: "missing" }),
    now.view.more,
    el("button", { type: "button", class: "main", id: "submit", on: { click: (event) => event.detail < 2 && submit() } }, t(now.item.task === "chat" ? "choose_and_go_on" : "submit"), " ", writes && key("Ctrl"), key("Enter")));
}

/* ---- text as it was written ---- */

const rawButton = () => el("button", { type: "button", class: "quiet", id: "raw-button", aria: { pressed: String(isRaw()) }, on: { click: showRaw } }, t("raw"), " ", key("r"));

function showRaw() {
  toggleRaw();
  document.getElementById("raw-button")?.setAttribute("aria-pressed", String(isRaw()));
  announce(t(isRaw() ? "raw_on" : "raw_off"));
}

/* ---- a suggested answer: it counts only once a person takes it over and sends it ---- */

const suggestion = (said) => el("section", { class: "card suggestion", aria: { label: t("suggested") } },
  el("h2", {}, t("suggested")), "text" in said ? text(said.text) : el("p", {}, judgement(said).join(" · ")),
  el("button", { type: "button", class: "small", id: "take-over", on: { click: takeOver } }, t("take_over"), " ", key("a")));

function takeOver() {
  if (!now?.item.suggestion || sending) return;
  const { suggestion: said } = now.item;
  const box = now.view.focus;
  if ("text" in said) { // as if typed, so that the browser's undo restores the earlier text
    box.focus();
    box.select();
    document.execCommand("insertText", false, said.text);
  } else {
    now.view.restore(said);
    changed();
  }
  announce(t("taken_over"));
}

/* ---- instructions ---- */

const versionOf = (item) => item.instructions?.version ?? item.instructions ?? 0;
const instructionsButton = () => el("button", { type: "button", class: "quiet", id: "instructions-button", hidden: versionOf(now.item) === 0, aria: { controls: "instructions", expanded: "false" }, on: { click: toggleInstructions } }, t("instructions_v", { version: versionOf(now.item) }), " ", key("i"));

function instructionsPane(item) {
  const pane = el("aside", { id: "instructions", class: "card instructions", aria: { label: t("page_instructions") }, hidden: true });
  pane.append(el("h2", {}, t("instructions_v", { version: versionOf(item) })), el("div", { class: "text", dir: "auto" }, item.instructions?.text || t("no_instructions")));
  queueMicrotask(() => { // stays open, and opens for a version that this person has not seen
    const unseen = versionOf(item) > (memory.get(`seen.${owner()}`) ?? 0) && item.instructions?.text;
    setInstructions(Boolean(item.instructions?.text && (unseen || memory.get("instructions"))));
  });
  return pane;
}

function setInstructions(open) {
  const pane = document.getElementById("instructions");
  if (!pane) return;
  pane.hidden = !open;
  main.classList.toggle("with-instructions", open);
  document.getElementById("instructions-button").setAttribute("aria-expanded", String(open));
}

function toggleInstructions() {
  if (versionOf(now.item) === 0) return; // nothing was written
  const open = document.getElementById("instructions").hidden;
  setInstructions(open);
  memory.set("instructions", open);
  if (!open) memory.set(`seen.${owner()}`, versionOf(now.item));
}

/* ---- drafts: kept in the browser at once, on the server after a moment ---- */

const owner = () => `${projectName(me)}.${me.id}`;
const draftName = () => `draft.${owner()}`;
/** Identifies the item and its assignment: a hidden repeat may show the answers in another order. */
const given = (item) => ({ item: item.id, assignment: item.assignment });
const seconds = () => Math.round(now.before * 10 + (performance.now() - now.shown) / 100) / 10;
const active = () => Math.min(seconds(), Math.round(now.activeBefore * 10 + (activeTime() - now.activeShown) / 100) / 10);

/** Drafts of this browser by tab, the last one last. */
const drafts = () => memory.get(draftName()) ?? {};
/** The draft of this tab for the item on the screen. */
const ownDraft = () => [drafts()[tab]].find((one) => one?.assignment === now.item.assignment);
let saves = 0;

function keepHere() {
  const { [tab]: _, ...others } = drafts();
  saves += 1;
  now.saved = false;
  const own = { assignment: now.item.assignment, draft: draftNow(), save: saves, past: now.past };
  memory.set(draftName(), Object.fromEntries([...Object.entries(others).slice(1 - MOST_TABS), [tab, own]]));
}

function forgetHere() {
  const { [tab]: _, ...others } = drafts();
  memory.set(draftName(), Object.keys(others).length ? others : null);
}

function draftNow() {
  const answer = { ...(now.view.draft ? now.view.draft() : now.view.answer()), ...now.criteria.answer() };
  return { answer, comment: now.comment.value, flags: now.flags, seconds: seconds(), active: active() };
}

function changed() {
  if (now === null || sending) return;
  now.changed = true;
  document.getElementById("missing").textContent = "";
  keepHere();
  clearTimeout(draftTimer);
  draftTimer = setTimeout(saveDraft, 800);
}

function saveDraft() {
  clearTimeout(draftTimer);
  if (now === null || sending || !ownDraft()) return;
  const keepalive = document.visibilityState === "hidden";
  sendDraft({ keepalive }).catch(() => {}); // the browser has it too
}

/** Sends the draft of this tab; the page then shows the drafts of other tabs from the reply. */
async function sendDraft(options) {
  const sent = now;
  const save = saves;
  const reply = await post("/api/draft", { ...given(sent.item), draft: draftNow(), tab, save, ...(sent.from ? { from: sent.from } : {}) }, options);
  sent.saved = save === saves;
  sent.others = reply.others ?? [];
  if (sent === now) drawOthers();
  return reply;
}

/** Texts about this item from other or closed tabs, to read and copy, so that nothing is lost. */
function drawOthers() {
  const own = { text: draftNow().answer?.text ?? "", comment: now.comment.value };
  const differing = now.others.filter((one) => (one.text && one.text !== own.text) || (one.comment && one.comment !== own.comment));
  const shown = [...new Map(differing.map((one) => [JSON.stringify([one.text, one.comment]), one])).values()];
  now.othersBox.hidden = shown.length === 0;
  if (now.othersBox.dataset.shown === JSON.stringify(shown)) return;
  now.othersBox.dataset.shown = JSON.stringify(shown);
  now.othersBox.replaceChildren(el("h2", {}, t("other_tabs")), el("p", { class: "hint" }, t("other_tabs_hint")), ...shown.flatMap((one) => [["not_saved_text", one.text], ["comment", one.comment]]).filter(([, text]) => text).map(written));
}

/** Renews the lease of an item during a long read, as long as the person scrolls or presses a key now and then. */
setInterval(() => {
  if (now === null || sending || document.visibilityState === "hidden" || idleTime() > STILL_THERE) return;
  if (ownDraft()) sendDraft().catch(() => {});
  else post("/api/draft", { ...given(now.item), draft: null }).catch(() => {}); // there is no draft yet
}, RENEW);

function restore(item) {
  const kept = Object.entries(drafts()).filter(([, one]) => one.assignment === item.assignment);
  const own = kept.find(([name]) => name === tab) ?? kept.find(([name]) => name === tabBefore) ?? (item.draft ? undefined : kept.at(-1));
  if (own) now.from = `${own[0]}.${own[1].save ?? 0}`;
  now.past = [...(own?.[1].past ?? []), now.from].filter(Boolean).slice(-20);
  for (const [name, { draft, save }] of kept) if (name !== own?.[0] && !now.past.includes(`${name}.${save}`)) now.others.push({ text: draft.answer?.text ?? "", comment: draft.comment });
  const draft = own ? own[1].draft : item.draft;
  if (own && item.draft && item.draft_of?.split(".")[0] !== own[0]) now.others.push({ text: item.draft.answer?.text ?? "", comment: item.draft.comment });
  if (!draft) return;
  now.before = Number(draft.seconds) || 0;
  now.activeBefore = Number(draft.active ?? draft.seconds) || 0;
  now.flags = (draft.flags ?? []).filter((name) => ITEM_FLAGS.includes(name));
  now.comment.value = draft.comment ?? "";
  now.commentBox.hidden = now.comment.value === "";
  now.view.restore(draft.answer ?? draft);
  now.criteria.restore(draft.answer?.criteria);
  if (own) { // under the name of this tab from now on
    now.changed = true;
    keepHere();
    draftTimer = setTimeout(saveDraft, 800);
  }
}

/* ---- sending ---- */

async function submit(more = {}) {
  if (now === null || sending) return;
  const missing = now.view.missing() ?? now.criteria.missing();
  if (missing !== null) {
    toast(missing, "warn");
    return;
  }
  const answer = { ...now.view.answer(more), ...now.criteria.answer() };
  const { item, view } = now;
  const body = { nonce: nonce(), ...given(item), answer, seconds: seconds(), active: active(), comment: now.comment.value.trim(), flags: now.flags, version: versionOf(item) };
  const reply = await deliver("/api/label", body);
  if (reply === null) return;
  if (view.sent?.(answer)) {
    drawProgress(reply.progress);
    Object.assign(now, { shown: performance.now(), activeShown: activeTime(), before: 0, activeBefore: 0 });
    changed();
  } else await next();
  toast(t("saved"));
}

/** Sends a decision through the outbox; until then the item stays. Null if the server refused it. */
async function deliver(path, body) {
  const about = body.item && excerpt(now.item.prompt);
  busy(true);
  clearTimeout(draftTimer);
  try {
    const reply = await out.send(path, body, about);
    forgetHere();
    tabs?.postMessage({ owner: owner(), item: body.item, words: wordsOf(body) });
    busy(false);
    return reply;
  } catch (error) {
    busy(false);
    if (error instanceof Refused && error.status === 409 && body.item === undefined) toast(said(error), "warn"); // undo and redo
    else if (error instanceof Refused && error.status === 409) {
      forgetHere();
      await next();
      if (now?.item.id === body.item) {
        now.view.lost?.();
        toast(said(error), "warn");
      } else toast(error.body.code === "withdrawn" ? said(error) : t("gone"), "warn");
      if (wordsOf(body).length) notSaved({ path, body, about, error });
    } else await attempt(() => { throw error; });
    return null;
  }
}

/** A request of a task (a chat's message): retried while offline, but not kept after another failure. */
const request = (path, body, options) => insist(() => post(path, body, options), MOST_TRIES);

const excerpt = (said) => {
  const characters = [...asText((Array.isArray(said) ? said.at(-1) : said) ?? "")];
  return characters.length > MOST_ABOUT ? `${characters.slice(0, MOST_ABOUT).join("")} …` : characters.join("");
};

/** Texts written by the person, with names: the answer, the comment, the details of a reason. */
const wordsOf = ({ answer, comment, reason }) => [["not_saved_text", answer?.text], ["comment", comment], ["skip_more", reason?.split(": ").slice(1).join(": ")]].filter(([, text]) => text);

/** A notice, until closed, about a refused request: the reason, the item, and the written texts, to copy. */
function notSaved({ path, body, about, error }) {
  ask(t(`not_saved_${path.slice("/api/".length)}`), [
    el("p", {}, error.status === 409 && error.body.code !== "withdrawn" && !body.answer?.turn ? t("not_saved_gone") : said(error)),
    about && el("p", { dir: "auto" }, t("not_saved_about", { about })),
    ...wordsOf(body).map(written)]);
}

/** A written text, to copy. */
function written([name, text]) {
  const box = el("textarea", { class: "writing", readonly: true, rows: name === "not_saved_text" ? "8" : "2", dir: "auto", aria: { label: t(name) } });
  box.value = text;
  return el("label", { class: "field" }, el("span", {}, t(name)), box);
}

/** Another tab has sent something. Text written here about an item that is no longer shown is kept. */
async function othersSent(data) {
  if (data.owner !== owner() || sending || (now !== null && data.item !== undefined && data.item !== now.item.id)) return;
  const draft = now?.changed && (data.item !== undefined || !now.saved) ? draftNow() : {};
  const isLost = wordsOf(draft).length > 0 && JSON.stringify(wordsOf(draft)) !== JSON.stringify(data.words);
  const about = isLost && excerpt(now.item.prompt);
  if (isLost) forgetHere();
  await next();
  if (isLost) notSaved({ path: "/api/label", body: draft, about, error: { status: 409, body: { code: "not_held" } } });
}

function busy(is) {
  sending = is;
  main.classList.toggle("sending", is);
  for (const control of main.querySelectorAll(".bar button")) control.toggleAttribute("inert", is);
}

/** Waits until the server has the latest draft, because an undo replaces the item. False if it was refused. */
async function keepDraft() {
  if (now === null || !ownDraft()) return true;
  clearTimeout(draftTimer);
  busy(true);
  const kept = await insist(() => sendDraft());
  busy(false);
  return kept !== null;
}

async function undo() {
  if (sending || over || !(await keepDraft())) return;
  const reply = await deliver("/api/undo", { nonce: nonce() });
  if (reply === null) return;
  if (reply.done === null) return toast(t("nothing_to_undo"));
  if (reply.item) show(reply);
  else await next();
  toast(t("undone"));
}

/** Restores what undo took back. An answer changed since then is new and is not replaced by the old one. */
async function redo() {
  if (sending || over) return;
  if (now !== null && now.changed) return toast(t("redo_changed"), "warn");
  const reply = await deliver("/api/redo", { nonce: nonce() });
  if (reply === null) return;
  if (reply.done === null) return toast(t("nothing_to_redo"));
  if (reply.item) show(reply);
  else await next();
  toast(t("redone"));
}

/* ---- skip, flag, comment ---- */

const numbered = (type, group, names, label, checked) => el("div", { class: "options" }, names.map((name, at) => el("label", {},
  el("input", { type, name: group, value: name, checked: checked(name, at), autofocus: at === 0 }), el("span", {}, label(name)), " ", key(at + 1))));

/** In a dialog with numbered options, digits tick them. */
function digits(dialog) {
  dialog.addEventListener("keydown", (event) => {
    const digit = latin(event);
    if (event.target.matches("input[type=text], textarea") || event.repeat || event.ctrlKey || event.metaKey || !/^[1-9]$/.test(digit)) return;
    const input = dialog.querySelectorAll(".options input")[Number(digit) - 1];
    input?.focus();
    input?.click();
  });
}

function skip() {
  if (now === null) return;
  const more = el("input", { type: "text", name: "more", maxlength: "300", aria: { label: t("skip_more") }, placeholder: t("skip_more") });
  digits(ask(t("skip_title"), [numbered("radio", "reason", SKIP_REASONS, (name) => t(`skip_${name}`), (_, at) => at === 0), more], t("skip"), (form) => {
    const reason = [form.elements.reason.value, more.value.trim()].filter(Boolean).join(": ");
    deliver("/api/skip", { nonce: nonce(), ...given(now.item), reason, flags: now.flags }).then((reply) => {
      if (reply === null) return;
      next().then(() => toast(t("skipped")));
    });
  }));
}

function flag() {
  if (now === null) return;
  digits(ask(t("flag_title"), [el("p", { class: "hint" }, t("flag_hint")), numbered("checkbox", "flag", ITEM_FLAGS, (name) => t(`item_flag_${name}`), (name) => now.flags.includes(name))], t("keep"), (form) => {
    now.flags = ITEM_FLAGS.filter((_, at) => form.querySelectorAll("input")[at].checked);
    drawFlags();
    changed();
  }));
}

function drawFlags() {
  now.flagNote.textContent = now.flags.length ? `⚑ ${now.flags.map((name) => t(`item_flag_${name}`)).join(" · ")}` : "";
}

function openComment() {
  if (now === null) return;
  now.commentBox.hidden = false;
  fit(now.comment);
  now.comment.focus();
}

/* ---- progress and help ---- */

function drawProgress(progress) {
  if (!progress) return;
  const total = progress.done + progress.left;
  const label = t(["screening", "held-out"].includes(me.standing) ? "progress_own" : "progress", { done: progress.done, total, today: progress.today ?? progress.own ?? 0 });
  const bar = el("progress", { max: Math.max(total, 1), value: progress.done, aria: { label: t("progress_label") } });
  document.getElementById("progress").replaceChildren(bar, el("span", {}, label));
}

const CHOOSE = [["1 2", "keys_choose"], ["t", "tie"], ["b", "both_bad"], ["3 4 5 6", "keys_strength"], ["← →", "keys_sides"], ["Backspace", "keys_clear"]];
const WRITE = [["e", "keys_write"]];
const KEYS = {
  pair: CHOOSE, chat: [...CHOOSE, ...WRITE], demonstration: WRITE, correction: WRITE, rating: [["1 … 7", "keys_rate"]],
  ranking: [["↑ ↓", "keys_rank_walk"], ["Shift ↑ ↓", "keys_rank_move"], ["=", "keys_rank_tie"], ["1 … 9", "keys_rank_digit"]],
};

/** The keys of the task that is shown, and those of every task. */
function help() {
  const rows = [...(now ? KEYS[now.item.task] : []), ...(now?.criteria.count ? [["k", "keys_criteria"]] : []), ...(now?.others.length ? [["a", "take_over"]] : []),
    ["Enter", "submit"], ["Ctrl Enter", "keys_send"], ["Esc", "keys_leave_text"], ["u", "undo"], ["y", "redo"], ["s", "skip"], ["f", "flag"], ["c", "comment"], ["i", "page_instructions"], ["r", "raw"], ["?", "help"]];
  const on = el("input", { type: "checkbox", checked: memory.get("keys") !== false, on: { change: () => memory.set("keys", on.checked) } });
  ask(t("help"), [
    el("dl", { class: "keys" }, rows.map(([keys, name]) => el("div", {}, el("dt", {}, keys.split(" ").map((one) => el("kbd", {}, one))), el("dd", {}, t(name))))),
    el("label", { class: "one-line" }, on, el("span", {}, t("single_keys"))),
    el("p", { class: "hint" }, t("blind_note")),
    el("p", { class: "hint" }, `${me.name} · ${t(`role_${me.role}`)} `, el("button", { type: "button", class: "quiet small", on: { click: leave } }, t("leave")))]);
}

/* ---- keys ---- */

const isText = (node) => node?.matches?.("textarea, input[type=text], select") ?? false;
const COMMANDS = { u: () => undo(), y: () => redo(), r: () => showRaw(), s: () => skip(), f: () => flag(), c: () => openComment(), i: () => now && toggleInstructions(), a: () => takeOver(), k: () => now?.criteria.enter(), "?": () => help() };

function onKey(event) {
  const isHeld = event.repeat && !event.key.startsWith("Arrow"); // a held key acts only once
  if (isHeld && (event.key === "Enter" || event.key === " ") && !isText(event.target)) event.preventDefault(); // no click either
  if (document.querySelector("dialog[open]") || event.isComposing) return; // dialogs and input methods have their own keys
  const active = document.activeElement;
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    if (event.repeat) return;
    if (active === now?.view.focus && now.view.textEnter) now.view.textEnter();
    else submit();
    return;
  }
  if (isText(active)) {
    if (event.key === "Escape") document.getElementById("question")?.focus();
    return;
  }
  if (event.ctrlKey || event.metaKey || isHeld || sending) return;
  if (event.key === "Enter") {
    if (active && active !== document.body && active.matches("a, button:not(.choice):not(.grip), summary")) return;
    event.preventDefault();
    submit();
    return;
  }
  const pressed = { key: latin(event), shiftKey: event.shiftKey, altKey: event.altKey };
  if (memory.get("keys") === false && pressed.key.length === 1 && pressed.key !== "?") return;
  if (now?.criteria.has(active, event.key)) {
    const meant = event.key === "Escape" ? (document.getElementById("question").focus(), true) : now.criteria.onKey(pressed);
    if (meant) event.preventDefault();
    if (meant !== false) return; // null: the browser moves between radio buttons
  }
  if (now?.view.onKey(pressed)) event.preventDefault();
  else if (!event.altKey && COMMANDS[pressed.key]) {
    event.preventDefault();
    COMMANDS[pressed.key]();
  }
}

/* ---- start ---- */

me = await start();
if (me !== null) {
  document.getElementById("extras").replaceWith(el("button", { type: "button", class: "quiet", id: "help", aria: { label: t("help") }, title: t("help"), on: { click: help } }, "?"));
  out = outbox(owner(), (waits) => {
    if (waits) offline(true, t("offline_kept"));
    else showBanner(null);
  });
  document.addEventListener("keydown", onKey);
  document.addEventListener("visibilitychange", () => document.visibilityState === "hidden" && saveDraft());
  window.addEventListener("pageshow", (event) => event.persisted && next()); // back to this page: it may be out of date
  tabs?.addEventListener("message", ({ data }) => othersSent(data));
  const refused = await attempt(() => out.flush());
  await next();
  if (refused) notSaved(refused);
  ready();
}

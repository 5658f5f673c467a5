// A live conversation: the person writes, two answers come, the better one is chosen, and the conversation continues from it.
import { pairChoice } from "../choice.js";
import { asText, conversation } from "../content.js";
import { el, key, nonce } from "../dom.js";
import { t } from "../words.js";
import { answerCards } from "./pair.js";
import { fit } from "./writing.js";

const SLOW = 300_000; // ms to wait for two answers of a model on a small machine

export function chat(item, { changed, request, submit }) {
  /** `messages` so far; `turn` and `answers` while two answers wait to be judged; `asking` the nonce of a question on its way. */
  const given = Array.isArray(item.prompt) ? item.prompt : item.prompt ? [{ role: "user", content: String(item.prompt) }] : [];
  const opening = given.at(-1)?.role === "user" ? asText(given.at(-1)) : ""; // proposed first message
  const state = { messages: opening ? given.slice(0, -1) : given, turn: null, answers: null };
  let choice = null;
  let asking = null;
  const thread = el("div", { class: "thread" });
  const body = el("div", { class: "chat" }, thread);
  const controls = el("div", { class: "chat-controls" });
  const box = el("textarea", { class: "writing", rows: "3", dir: "auto", aria: { label: t("your_message") }, placeholder: t("your_message"), on: { input: () => { fit(box); changed(); } } });
  box.value = opening;
  const sendButton = el("button", { type: "button", class: "main", on: { click: ask } }, t("send_message"), " ", key("Ctrl"), key("Enter"));
  const endButton = el("button", { type: "button", class: "choice", on: { click: () => submit({ last: true }) } }, key("e"), el("span", {}, t("choose_and_end")));

  async function ask() {
    if (asking !== null || box.value.trim() === "") return;
    asking = nonce();
    const messages = [...state.messages, { role: "user", content: box.value }];
    draw();
    const reply = await request("/api/chat", { nonce: asking, item: item.id, messages }, { patience: SLOW });
    asking = null;
    if (reply !== null) {
      Object.assign(state, { messages, turn: reply.turn, answers: reply.answers });
      box.value = "";
      changed();
    }
    draw();
  }
  function draw() {
    thread.replaceChildren(...(state.messages.length ? [el("section", { class: "card" }, conversation(state.messages))] : [el("p", { class: "card notice" }, t("chat_start"))]));
    if (state.turn === null) {
      choice = null;
      const waits = asking !== null;
      thread.append(el("section", { class: "card" }, el("h2", {}, t(waits ? "chat_waiting" : "your_message")), waits && el("div", { class: "busy" }), box, el("div", { class: "row end" }, sendButton)));
      box.disabled = sendButton.disabled = waits;
      controls.replaceChildren(el("p", { class: "keys-line" }, key("Ctrl"), "+", key("Enter"), " ", t("keys_send_message")));
      fit(box);
      if (!waits) box.focus();
    } else {
      const cards = answerCards(state.answers);
      choice = pairChoice(cards, changed);
      thread.append(el("div", { class: "side-by-side" }, cards));
      controls.replaceChildren(choice.element);
      box.blur();
    }
    endButton.hidden = choice === null;
    controls.classList.toggle("writes", choice === null);
  }
  draw();

  return {
    body,
    controls,
    focus: box,
    more: endButton,
    textEnter: ask,
    onKey(event) {
      if (choice === null) return event.key === "e" && (box.focus(), true);
      if (event.key === "e") return submit({ last: true }), true;
      return choice.onKey(event);
    },
    missing: () => (choice === null ? t("message_first") : choice.missing()),
    answer: (more = {}) => ({ turn: state.turn, ...choice.answer(), last: Boolean(more.last) }),
    draft: () => ({ ...state, text: box.value, choice: choice?.answer() ?? null }),
    restore(draft) {
      if (!Array.isArray(draft?.messages)) return;
      Object.assign(state, { messages: draft.messages, turn: draft.turn ?? null, answers: draft.answers ?? null });
      box.value = draft.text ?? "";
      draw();
      choice?.restore(draft.choice);
    },
    /** The server no longer has the two answers (it was restarted): the message can be sent again. */
    lost() {
      if (state.turn === null) return;
      box.value = asText(state.messages.at(-1));
      Object.assign(state, { messages: state.messages.slice(0, -1), turn: null, answers: null });
      draw();
      changed();
    },
    /** After a turn was sent: the chosen answer is part of the conversation (the left one of a tie). True if the chat continues. */
    sent(answer) {
      if (answer.last) return false;
      state.messages = [...state.messages, { role: "assistant", content: asText(state.answers[answer.preferred ?? 0]) }];
      Object.assign(state, { turn: null, answers: null });
      draw();
      return true;
    },
  };
}

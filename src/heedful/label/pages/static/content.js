// Shows prompts and answers. Text is text: it keeps its line breaks, and its direction does not leak into the page.
import { el } from "./dom.js";
import { known, t } from "./words.js";

/** A block of model or human text. */
export const text = (value, attributes = {}) => el("div", { class: "text", dir: "auto", ...attributes }, value);

/** Sanitised HTML that the server made from Markdown: the one place where markup is taken, and only from there. */
function markdown(html) {
  const node = el("div", { class: "text markdown", dir: "auto" });
  const parsed = new DOMParser().parseFromString(html, "text/html");
  node.append(...parsed.body.childNodes);
  return node;
}

const plain = (value) => (typeof value === "string" ? value : JSON.stringify(value, null, 2));

/** The text in a message's content: a string, or a list of parts of which the texts are joined and the others shown as JSON. */
function contentOf(content) {
  if (!Array.isArray(content)) return plain(content ?? "");
  return content.map((part) => (typeof part?.text === "string" ? part.text : plain(part))).join("\n");
}

/** An answer or prompt as text for measuring, editing and copying. */
export function asText(value) {
  if (typeof value === "string") return value;
  if (Array.isArray(value)) return value.map(asText).join("\n\n");
  return value && "content" in value ? contentOf(value.content) : plain(value);
}

/** One message: who says it, the text, and whatever else it has (reasoning, tool calls), which is shown and not dropped. */
function message(one) {
  const { role, content, ...rest } = one;
  const extra = Object.entries(rest).filter(([, value]) => value !== null && value !== undefined && value !== "");
  return el("div", { class: `message ${["user", "assistant", "system"].includes(role) ? role : "other"}` },
    el("div", { class: "role" }, known(`role_in_chat_${role}`) ? t(`role_in_chat_${role}`) : String(role ?? "")),
    extra.map(([name, value]) => el("div", { class: "aside-text" }, el("div", { class: "role" }, name), text(plain(value)))),
    content === null || content === undefined ? null : text(contentOf(content)));
}

/** A conversation with who says what. */
export const conversation = (messages) => el("div", { class: "messages" }, messages.map(message));

/** A prompt: raw text or a conversation. */
export function prompt(value) {
  if (typeof value === "string") return text(value);
  const messages = Array.isArray(value) ? value : [value];
  if (messages.length === 1 && messages[0].role === "user" && Object.keys(messages[0]).length === 2) return text(contentOf(messages[0].content));
  return conversation(messages);
}

/** An answer: text, a message, several messages, or HTML that the server sanitised. */
export function answer(value, html = null) {
  if (html) return markdown(html);
  if (typeof value === "string") return value === "" ? el("div", { class: "text empty" }, t("empty_answer")) : text(value);
  const messages = Array.isArray(value) ? value : [value];
  if (messages.length === 1 && Object.keys(messages[0] ?? {}).every((name) => name === "role" || name === "content")) return answer(asText(messages[0]));
  return conversation(messages);
}

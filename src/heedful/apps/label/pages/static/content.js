// Shows prompts and answers. Text keeps its line breaks, and its direction does not affect the page.
import { el, memory } from "./dom.js";
import { known, t } from "./words.js";

const FENCE = /^\s*(`{3,}|~{3,})/;
const ROW = /^\s*\|.*\|/;
const RULE = /^\s*[-:+|=][-:+|=\s]*$/; // a line between the head and the rows of a table, which may lack its outer bars
const INDENTED = /^(\t| {4,})\s*(?!\s|[-*+•] |\d+[.)] )\S/; // code, not a nested list
const CODE = /(`+)(?!`)[^\n]*?[^`\n]\1(?!`)/g;

/** How each block of text on the page is drawn: formatted, or every character as it was written. */
const drawn = new WeakMap();
let raw = memory.get("raw") === true;
export const isRaw = () => raw;

/** Shows all text of the page as written, in a monospace font, or formatted again. */
export function toggleRaw() {
  raw = !raw;
  memory.set("raw", raw);
  for (const node of document.querySelectorAll(".text")) drawn.get(node)?.();
  markScrolling();
}

/** Makes overflowing content scrollable, also by keyboard. */
export function markScrolling() {
  for (const node of document.querySelectorAll(".text .sideways")) {
    if (node.scrollWidth > node.clientWidth) node.setAttribute("tabindex", "0");
    else node.removeAttribute("tabindex");
  }
}

/** A block of model or human text. `html` is its HTML, sanitised by the server: the only place that accepts markup. */
export function text(value, html = null) {
  const node = el("div", { class: "text", dir: "auto" });
  const draw = () => {
    node.classList.toggle("raw", raw);
    node.classList.toggle("markdown", !raw && html !== null);
    node.replaceChildren(...(raw ? [value] : html === null ? blocks(String(value)) : markup(html)));
  };
  drawn.set(node, draw);
  draw();
  return node;
}

function markup(html) {
  const { body } = new DOMParser().parseFromString(html, "text/html");
  for (const table of body.querySelectorAll("table")) {
    const around = el("div", { class: "sideways" });
    table.replaceWith(around);
    around.append(table);
  }
  return [...body.childNodes];
}

/** Text as nodes with exactly its characters; code and tables are in a monospace font. */
function blocks(value) {
  const lines = value.split(/(?<=\n)/);
  const kinds = kindsOf(lines);
  const nodes = [];
  for (let from = 0, to = 1; from < lines.length; from = to, to += 1) {
    while (to < lines.length && kinds[to] === kinds[from]) to += 1;
    const part = lines.slice(from, to).join("");
    nodes.push(...(kinds[from] ? [el("span", { class: `mono ${kinds[from]}` }, part)] : spans(part)));
  }
  return nodes;
}

/** For each line "lines" (code), "sideways" (a table, which is scrolled and not broken) or "". */
function kindsOf(lines) {
  const kinds = lines.map(() => "");
  const fill = (kind, from, to) => kinds.fill(kind, from, to);
  for (let at = 0; at < lines.length; at += 1) {
    const fence = FENCE.exec(lines[at])?.[1];
    if (!fence) continue;
    const closed = lines.findIndex((line, index) => index > at && line.trim().startsWith(fence) && line.trim().replaceAll(fence[0], "") === "");
    const end = closed < 0 ? lines.length : closed + 1;
    fill("lines", at, end);
    at = end - 1;
  }
  const hasBar = (at) => kinds[at] === "" && lines[at].includes("|");
  const isRow = (at) => hasBar(at) && ROW.test(lines[at]);
  for (let at = 0; at + 1 < lines.length; at += 1) {
    if (!(isRow(at) && isRow(at + 1)) && !(hasBar(at) && hasBar(at + 1) && RULE.test(lines[at + 1]))) continue;
    let end = at + 2;
    while (end < lines.length && hasBar(end)) end += 1;
    fill("sideways", at, end);
    at = end - 1;
  }
  for (let at = 0, end = 0; at < lines.length; at = Math.max(end, at + 1)) {
    for (end = at; end < lines.length && kinds[end] === "" && lines[end].trim() !== ""; end += 1);
    if (lines.slice(at, end).some((line) => INDENTED.test(line))) fill("lines", at, end);
  }
  return kinds;
}

/** Text with the parts between backticks in a monospace font; the backticks stay. */
function spans(value) {
  const nodes = [];
  let done = 0;
  for (const found of value.matchAll(CODE)) {
    nodes.push(value.slice(done, found.index), el("span", { class: "mono" }, found[0]));
    done = found.index + found[0].length;
  }
  return [...nodes, value.slice(done)];
}

const plain = (value) => (typeof value === "string" ? value : JSON.stringify(value, null, 2));

/** The text in a message's content: a string, or a list of parts: texts are joined, others are shown as JSON. */
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

/** A call of a tool as it is written in a program; anything else as JSON. */
function call(one) {
  const { name, arguments: given } = one?.function ?? {};
  return name === undefined ? plain(one) : `${name}(${typeof given === "string" ? given : JSON.stringify(given)})`;
}

/** One message: role, text, calls of tools, and all other fields, such as reasoning. Ids only say which result is of which call. */
function message(one) {
  const { role, name, content, tool_calls: calls, tool_call_id: _, ...rest } = one;
  const extra = Object.entries(rest).filter(([, value]) => value !== null && value !== undefined && value !== "");
  const aside = (title, value) => el("div", { class: "aside-text" }, el("div", { class: "role" }, title), text(value));
  const who = known(`role_in_chat_${role}`) ? t(`role_in_chat_${role}`) : String(role ?? "");
  return el("div", { class: `message ${["user", "assistant", "system"].includes(role) ? role : "other"}` },
    el("div", { class: "role" }, name ? `${who} · ${name}` : who),
    extra.map(([title, value]) => aside(title, plain(value))),
    content === null || content === undefined || (content === "" && calls?.length) ? null : text(contentOf(content)),
    (calls ?? []).map((one) => aside(t("calls_tool"), call(one))));
}

/** A conversation with the role of each message. */
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
  if (html) return text(value, html);
  if (typeof value === "string") return value === "" ? el("div", { class: "text empty" }, t("empty_answer")) : text(value);
  const messages = Array.isArray(value) ? value : [value];
  if (messages.length === 1 && Object.keys(messages[0] ?? {}).every((name) => name === "role" || name === "content")) return answer(asText(messages[0]));
  return conversation(messages);
}

/** A non-text answer in words: the better answer, the order (best first), or the rating. */
export function judgement(said) {
  if ("preferred" in said) return [said.preferred === null ? t(said.both_bad ? "both_bad" : "tie") : t("answer_n_better", { n: said.preferred + 1 }), ...(said.strength ? [t(`strength_${said.strength}`)] : [])];
  if ("ranks" in said) {
    const order = said.ranks.map((rank, at) => ({ rank, name: t("answer_n", { n: at + 1 }) })).sort((one, other) => one.rank - other.rank);
    return [order.map(({ rank, name }, at) => (at === 0 ? name : `${order[at - 1].rank === rank ? "=" : ">"} ${name}`)).join(" ")];
  }
  return [t("rating_n", { n: said.rating }), ...said.flags.map((name) => t(`flag_${name}`))];
}

// Withdraws items, those of an import or a single one, and puts them back.
import { post } from "./api.js";
import { el } from "./dom.js";
import { ask, attempt, toast } from "./shell.js";
import { number, t } from "./words.js";

/** Asks for a reason, then withdraws (or puts back) what `which` names: a `batch` or an `item`; `then` is called afterwards. */
export function withdraw(which, then) {
  const words = (about) => t(which.back ? `put_back_${about}` : `withdraw_${about}`);
  const reason = el("input", { type: "text", maxlength: "1000", dir: "auto" });
  ask(words(which.batch ? "batch" : "item"), [el("div", { class: "stack" }, which.batch && el("p", { dir: "auto" }, which.batch), el("p", {}, words("means")),
    el("label", { class: "field" }, el("span", {}, t("correction_reason")), reason))], t(which.back ? "put_back" : "withdraw"), () => {
    attempt(() => post("/api/withdraw", { ...which, reason: reason.value.trim() })).then(async (reply) => {
      if (reply === null) return;
      await then();
      toast(t(which.back ? "items_back" : "items_withdrawn", { n: number(reply.changed) }));
    });
  });
}

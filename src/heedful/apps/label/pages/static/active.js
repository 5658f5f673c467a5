// Working time on an item: the time in which the page is visible, has the focus, and is used now and then.

/** ms without key, click, scroll or pointer move until time stops counting; long enough to read a text. */
const IDLE = 60_000;

let total = 0;
let since = performance.now();
let last = since;
let focused = document.hasFocus();
let on = false;

/** Adds the time since the last call; `used`: the person has just done something. */
function tick(used = false) {
  const now = performance.now();
  if (on) total += Math.max(0, Math.min(now, last + IDLE) - since);
  since = now;
  const was = on;
  on = document.visibilityState === "visible" && focused && document.hasFocus();
  if (used || (on && !was)) last = now;
  return total;
}

const use = (isHere) => () => {
  focused ||= isHere;
  tick(true);
};
for (const kind of ["keydown", "pointerdown", "input"]) document.addEventListener(kind, use(true), { capture: true, passive: true });
for (const kind of ["pointermove", "wheel", "touchmove", "scroll"]) document.addEventListener(kind, use(false), { capture: true, passive: true });
document.addEventListener("visibilitychange", () => tick());
window.addEventListener("blur", () => { focused = false; tick(); });
window.addEventListener("focus", () => { focused = true; tick(); });
setInterval(tick, 1000, false);
tick();

/** ms of work since the page was loaded. */
export const activeTime = () => tick();
/** ms since the last use of the page. */
export const idleTime = () => performance.now() - last;

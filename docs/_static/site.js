// What scrolls by itself (wide tables, formulas, outputs) can be scrolled by keyboard too.
function makeScrollable() {
  for (const part of document.querySelectorAll(".bd-article table, .bd-article mjx-container, .bd-article pre, .bd-article .cell_output > *")) {
    if (part.scrollWidth > part.clientWidth && getComputedStyle(part).overflowX === "auto") part.tabIndex = 0;
    else if (part.dataset.scrolls) part.removeAttribute("tabindex");
    if (part.tabIndex === 0) part.dataset.scrolls = "yes";
  }
}
window.addEventListener("load", () => {
  makeScrollable();
  const mathematics = window.MathJax && MathJax.startup && MathJax.startup.promise;
  if (mathematics) mathematics.then(makeScrollable);
});
window.addEventListener("resize", makeScrollable);

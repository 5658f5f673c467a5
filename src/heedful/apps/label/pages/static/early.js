// Runs before the first paint, so that a dark page does not flash white.
"use strict";
try {
  const theme = JSON.parse(localStorage.getItem("heedful.theme"));
  if (theme === "dark" || theme === "light") document.documentElement.dataset.theme = theme;
  const language = JSON.parse(localStorage.getItem("heedful.language"));
  if (language === "zh" || language === "en") document.documentElement.lang = language === "zh" ? "zh-CN" : "en";
} catch {
  // Storage may be forbidden; the system's theme and language are used then.
}

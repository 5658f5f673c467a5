// A served page asks whether the run has gone on, and is loaded anew; while somebody is at the tokens it only says so.
(() => {
  const EVERY = 3000;
  const news = document.getElementById("news"), known = document.documentElement.dataset.version;
  async function ask() {
    try {
      const answer = await fetch("/version", { cache: "no-store" });
      const version = (await answer.text()).trim();
      if (answer.ok && version !== known) {
        const isBusy = document.activeElement && document.activeElement !== document.body;
        if (!isBusy) return location.reload();
        news.textContent = "The run has gone on: reload the page to see it.";
      } else news.textContent = "Up to date; the page follows the run.";
    } catch { news.textContent = "heedful watch has ended; the page stays as it is."; }
    setTimeout(ask, EVERY);
  }
  setTimeout(ask, EVERY);
})();

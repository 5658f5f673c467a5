"use strict";
// The token inspector: unpacks the responses, draws those that are near the screen, moves over their tokens.
// Texts are set as text, never as markup.

(() => {
  const source = document.getElementById("data");
  if (!source) return;
  const $ = name => document.getElementById(name);
  const NEAR = "1200px 0px";
  const PART = "\u2025"; // a token that ends inside a character: the one that completes it shows it
  const MINUS = "\u2212";
  const VISIBLE = { "\n": "\u21b5\n", "\t": "\u21e5\t" };
  let data, order = [], current = null;

  async function unpacked(base64) {
    const bytes = Uint8Array.from(atob(base64), character => character.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    return new Uint8Array(await new Response(stream).arrayBuffer());
  }

  function half(bits) {
    const sign = bits & 0x8000 ? -1 : 1, exponent = (bits >> 10) & 31, fraction = bits & 1023;
    if (exponent === 31) return fraction ? NaN : sign * Infinity;
    return sign * (exponent ? 2 ** (exponent - 15) * (1 + fraction / 1024) : 2 ** -24 * fraction);
  }

  function parse(bytes) {
    const view = new DataView(bytes.buffer);
    const length = view.getUint32(0, true);
    const header = JSON.parse(new TextDecoder().decode(bytes.subarray(4, 4 + length)));
    const responses = [];
    let total = 0;
    for (const [run, step, row, prompt, tokens, score, kl, finish, has, divergence, rewards, failure, turns, ids] of header.responses) {
      const one = { run, step, row, prompt, tokens, score, kl, finish, has, divergence, rewards, failure, ids, begin: total };
      one.turns = turns.map(([end, reward, numbers, calls, said]) => ({ end, reward, numbers, calls, said }));
      responses.push(one);
      total += ids.length;
    }
    let at = 4 + length;
    const texts = new Uint32Array(bytes.buffer.slice(at, at + 4 * total));
    at += 4 * total;
    const columns = header.quantities.map((_, column) => {
      const numbers = new Float32Array(total);
      for (let i = 0; i < total; i++) numbers[i] = half(bytes[at + i] << 8 | bytes[at + total + i]) * header.scales[column];
      at += 2 * total;
      return numbers;
    });
    return { ...header, responses, texts, columns };
  }

  const names = () => data.quantities.map(([name]) => name);
  const column = name => data.columns[names().indexOf(name)];
  const known = (one, name) => (one.has >> names().indexOf(name)) & 1;

  function largest(one, name) {
    if (!known(one, name)) return -Infinity;
    const numbers = column(name);
    let found = -Infinity;
    for (let i = one.begin; i < one.begin + one.ids.length; i++) found = Math.max(found, Math.abs(numbers[i]) || 0);
    return found;
  }

  function limit(name) { // the magnitude below which 95 of 100 numbers are
    const sizes = [...column(name)].map(Math.abs).filter(Number.isFinite).sort((a, b) => a - b);
    const found = sizes[Math.floor(0.95 * (sizes.length - 1))] || sizes[sizes.length - 1] || 0;
    return found > 0 ? found : 1;
  }

  function shown(number) {
    if (number === null || number === undefined) return "\u2013";
    if (!Number.isFinite(number)) return String(number);
    const text = Math.abs(number) >= 1e5 || (number !== 0 && Math.abs(number) < 1e-4)
      ? number.toExponential(2) : String(Number(number.toPrecision(3)));
    return text.replaceAll("-", MINUS);
  }

  const KEYS = {
    kl: one => one.kl ?? -Infinity,
    ratio: one => one.top.ratio,
    advantage: one => one.top.advantage,
    high: one => one.score ?? -Infinity,
    low: one => -(one.score ?? Infinity),
    divergence: one => one.divergence ?? -Infinity,
  };

  function choose() {
    const run = $("run").value, end = $("end").value, words = $("text").value.toLowerCase();
    const from = Number($("from").value) || 0, to = Number($("to").value) || Infinity;
    const key = KEYS[$("order").value];
    order = data.responses.filter(one => (run === "" || String(one.run) === run) && (end === "" || one.finish === end)
      && one.step >= from && one.step <= to && (!words || one.words.includes(words))
      && (key !== KEYS.divergence || one.divergence !== null));
    if (key) order = order.map(one => [key(one), one]).sort((a, b) => b[0] - a[0]).map(([, one]) => one);
    draw();
  }

  const watcher = new IntersectionObserver(seen => {
    for (const { target, isIntersecting, boundingClientRect } of seen) {
      if (isIntersecting) fill(target);
      else empty(target, boundingClientRect.height); // as observed: asking for it now would lay the page out each time
    }
  }, { rootMargin: NEAR });

  function draw() {
    watcher.disconnect();
    current = null;
    const list = $("responses"), wide = list.clientWidth || 600, begun = document.createDocumentFragment();
    for (let i = 0; i < order.length; i++) {
      const item = document.createElement("li");
      item.dataset.place = i;
      item.style.minHeight = `${70 + 30 * Math.ceil(order[i].ids.length * 38 / wide) + 80 * order[i].turns.length}px`;
      begun.append(item);
    }
    list.replaceChildren(begun);
    for (const item of list.children) watcher.observe(item);
    const of = data.responses.length;
    $("count").textContent = `${order.length.toLocaleString("en")} of ${of.toLocaleString("en")} responses on this page are shown.`;
    $("numbers").hidden = true;
    if (list.firstChild) fill(list.firstChild);
  }

  function element(kind, name, text) {
    const made = document.createElement(kind);
    if (name) made.className = name;
    if (text !== undefined) made.textContent = text;
    return made;
  }

  function fill(item) {
    if (item.firstChild) return;
    const place = Number(item.dataset.place), one = order[place];
    const said = [`step ${one.step}, row ${one.row}`, `score ${shown(one.score)}`, `KL ${shown(one.kl)}`,
      `${one.tokens} tokens`, one.turns.length && `${one.turns.length} turn${one.turns.length > 1 ? "s" : ""}`, data.ends[one.finish]];
    if (data.runs.length > 1) said.unshift(data.runs[one.run]);
    for (const [name, value] of Object.entries(one.rewards)) said.push(`${name} ${shown(value)}`);
    item.append(element("p", "head", said.filter(Boolean).join(" \u00b7 ")));
    const prompt = element("p", "prompt", data.prompts[one.prompt]);
    prompt.dir = "auto";
    item.append(prompt);
    if ($("compare").checked) {
      const two = element("div", "two");
      for (const [name, title] of pairs()) {
        const side = element("div");
        side.append(element("p", "head", title), ...written(one, place, name, title));
        two.append(side);
      }
      item.append(two);
    } else item.append(...written(one, place, $("by").value, ""));
    if (one.failure) item.append(element("p", "failure", `The environment ${one.failure}`));
    item.style.minHeight = "";
  }

  function pairs() { // what each of two models says: log-probs, or values if these colour the page
    const kind = $("by").value.endsWith("value") && data.compared.some(name => name.endsWith(": value")) ? ": value" : ": log-prob";
    return data.compared.filter(name => name.endsWith(kind)).map(name => [name, name]);
  }

  function empty(item, height) {
    if (!item.firstChild || item.querySelector('[tabindex="0"]')) return; // the way in by keyboard stays
    item.style.minHeight = `${height}px`;
    item.replaceChildren();
  }

  function written(one, place, name, title) { // a response, or the turns of an episode and what the other one said to each
    if (!one.turns.length) return [tokens(one, place, name, title, 0, one.tokens)];
    return one.turns.map((turn, k) => {
      const part = element("section", "turn"), number = `turn ${k + 1} of ${one.turns.length}`;
      const said = [number, ...Object.entries(turn.numbers).map(([of, value]) => `${of} ${shown(value)}`)];
      const line = element("div", "line");
      line.append(tokens(one, place, name, [number, title].filter(Boolean).join(", "), k ? one.turns[k - 1].end : 0, turn.end));
      if (turn.reward !== null) line.append(" ", element("span", "reward", `reward ${shown(turn.reward)}`));
      part.append(element("p", "whose", said.join(" \u00b7 ")), line, ...turn.calls.map(call => element("p", "call", `calls ${call}`)));
      for (const [role, words] of turn.said) {
        const other = element("div", "other"), text = element("div", "text", words);
        text.dir = "auto";
        other.append(element("p", "head", role), text);
        part.append(other);
      }
      return part;
    });
  }

  function tokens(one, place, name, title, start, end) { // those from a place of the response up to another
    const box = element("div", "tokens");
    box.setAttribute("role", "listbox");
    box.setAttribute("aria-orientation", "horizontal");
    box.tabIndex = place === (current ? current.place : 0) ? 0 : -1;
    box.setAttribute("aria-label", `response of step ${one.step}, row ${one.row}${title ? `, ${title}` : ""}, coloured by ${name}`);
    const numbers = column(name), has = known(one, name), most = limits(name);
    const left = one.tokens - one.ids.length, from = left ? data.longest[0] - data.longest[1] : one.tokens; // the first not shown
    for (let at = start; at < end; at++) {
      if (at >= from && at < from + left) {
        const next = Math.min(end, from + left), gap = element("span", "gap", ` \u22ef ${next - at} tokens \u22ef `);
        gap.setAttribute("role", "option");
        gap.dataset.gap = "";
        box.append(gap);
        at = next - 1;
        continue;
      }
      const i = at < from ? at : at - left;
      const text = data.vocabulary[data.texts[one.begin + i]];
      const token = element("span", text.trim() ? "" : "space", text.replace(/[\n\t]/g, found => VISIBLE[found]) || "\u2205");
      token.setAttribute("role", "option");
      if (!text.trim()) token.setAttribute("aria-label", "white space");
      if (text === PART) token.classList.add("part");
      token.dataset.i = i;
      const number = numbers[one.begin + i];
      if (has && !Number.isFinite(number)) token.classList.add("odd");
      else if (has) {
        const strength = Math.min(1, Math.abs(number) / most);
        token.style.backgroundColor = number > 0 ? `rgb(43 123 186 / ${0.6 * strength})` : `rgb(224 112 42 / ${0.6 * strength})`;
      }
      box.append(token);
    }
    return box;
  }

  const found = new Map();
  function limits(name) {
    if (!found.has(name)) {
      const ours = data.compared.includes(name) ? data.compared.filter(other => other.slice(-5) === name.slice(-5)) : [name];
      found.set(name, Math.max(...ours.map(limit)));
    }
    return found.get(name);
  }

  function tell(box, i) {
    const item = box.closest("li"), place = Number(item.dataset.place), one = order[place];
    for (const old of document.querySelectorAll(".tokens .now")) old.classList.remove("now");
    const token = box.querySelector(`[data-i="${i}"]`);
    if (!token) return;
    token.classList.add("now");
    if (!token.id) token.id = `t${place}-${i}-${sideOf(box)}`;
    for (const other of box.querySelectorAll("[aria-selected]")) other.removeAttribute("aria-selected");
    token.setAttribute("aria-selected", "true");
    box.setAttribute("aria-activedescendant", token.id);
    current = { place, i };
    const at = one.ids.length < one.tokens && i >= data.longest[0] - data.longest[1] ? i + one.tokens - one.ids.length : i;
    const text = data.vocabulary[data.texts[one.begin + i]];
    const list = element("dl");
    for (const name of names()) {
      if (!known(one, name)) continue;
      const pair = element("div"), number = column(name)[one.begin + i];
      const ratio = name === "log-ratio" && Number.isFinite(number) ? ` (ratio ${shown(Math.exp(number))})` : "";
      pair.append(element("dt", "", name), element("dd", "", shown(number) + ratio));
      list.append(pair);
    }
    const turn = one.turns.length ? `turn ${one.turns.findIndex(turn => at < turn.end) + 1}, ` : "";
    const what = element("p", "what", `${JSON.stringify(text)}, id ${one.ids[i]}, ${turn}token ${at + 1} of ${one.tokens}, step ${one.step}, row ${one.row}`);
    $("numbers").replaceChildren(what, list);
    $("numbers").hidden = false;
  }

  const sideOf = box => [...box.closest("li").querySelectorAll(".two > div")].indexOf(box.closest(".two > div")); // -1: there is one

  function go(place, i, side) {
    place = Math.max(0, Math.min(order.length - 1, place));
    const item = $("responses").children[place];
    if (!item) return;
    fill(item);
    item.scrollIntoView({ block: "nearest" });
    i = Math.max(0, Math.min(order[place].ids.length - 1, i));
    const ofSide = [...item.querySelectorAll(".tokens")].filter(box => sideOf(box) === side);
    const box = ofSide.find(one => one.querySelector(`[data-i="${i}"]`)) ?? ofSide[0];
    for (const other of document.querySelectorAll('.tokens[tabindex="0"]')) other.tabIndex = -1;
    for (const own of item.querySelectorAll(".tokens")) own.tabIndex = 0;
    box.focus({ preventScroll: true });
    tell(box, i);
    box.querySelector(".now")?.scrollIntoView({ block: "nearest" });
  }

  $("responses").addEventListener("keydown", event => {
    const box = event.target.closest(".tokens");
    if (!box || event.ctrlKey || event.metaKey || event.altKey) return;
    const place = Number(box.closest("li").dataset.place), i = current && current.place === place ? current.i : 0;
    const moves = {
      ArrowRight: [place, i + 1], ArrowLeft: [place, i - 1], ArrowDown: [place + 1, 0], ArrowUp: [place - 1, 0],
      Home: [place, 0], End: [place, order[place].ids.length - 1],
    };
    if (!(event.key in moves)) return;
    event.preventDefault();
    go(...moves[event.key], sideOf(box));
  });
  $("responses").addEventListener("focusin", event => {
    const box = event.target.closest(".tokens");
    const token = box && (box.querySelector("[aria-selected]") ?? box.querySelector("[data-i]"));
    if (token) tell(box, Number(token.dataset.i));
  });
  for (const kind of ["pointerover", "click"]) {
    $("responses").addEventListener(kind, event => {
      const token = event.target.closest("[data-i]");
      if (token) tell(token.closest(".tokens"), Number(token.dataset.i));
    });
  }

  const CONTROLS = ["by", "order", "run", "from", "to", "end", "text", "compare"];
  const KEPT = "heedful inspector";

  function keep() { // so that a page that is served anew looks as before
    try {
      sessionStorage.setItem(KEPT, JSON.stringify(CONTROLS.map(name => name === "compare" ? $(name).checked : $(name).value)));
    } catch { /* a file may have no storage */ }
  }

  function restore() {
    try {
      const kept = JSON.parse(sessionStorage.getItem(KEPT)) || [];
      CONTROLS.forEach((name, i) => {
        if (i >= kept.length) return;
        if (name === "compare") $(name).checked = kept[i];
        else if ($(name).tagName === "INPUT" || [...$(name).options].some(one => one.value === kept[i])) $(name).value = kept[i];
      });
    } catch { /* likewise */ }
  }

  function option(select, value, text) {
    const made = element("option", "", text);
    made.value = value;
    select.append(made);
  }

  function repaint() {
    $("limit").textContent = `${shown(limits($("by").value))} (95 of 100 tokens are below it)`;
    const meaning = data.quantities[names().indexOf($("by").value)][1];
    $("by").title = meaning;
  }

  async function start() {
    data = parse(await unpacked(source.textContent));
    for (const one of data.responses) {
      one.top = { ratio: largest(one, "log-ratio"), advantage: largest(one, "advantage") };
      const texts = [...data.texts.subarray(one.begin, one.begin + one.ids.length)].map(text => data.vocabulary[text]);
      const others = one.turns.flatMap(turn => turn.said.map(([, words]) => words));
      one.words = [data.prompts[one.prompt], texts.join(""), ...others, one.failure].join("\n").toLowerCase();
    }
    data.quantities.forEach(([name], bit) => {
      if (data.responses.some(one => (one.has >> bit) & 1)) option($("by"), name, name);
    });
    for (const [name, words] of Object.entries(data.ends)) {
      const listed = [...$("end").options].some(one => one.value === name);
      if (!listed && data.responses.some(one => one.finish === name)) option($("end"), name, words);
    }
    option($("run"), "", "all");
    const logged = new Set(data.responses.map(one => one.run));
    data.runs.forEach((name, i) => logged.has(i) && option($("run"), String(i), name));
    $("run").parentElement.hidden = logged.size < 2;
    if (!data.responses.some(one => one.divergence !== null)) $("order").querySelector("[value=divergence]").remove();
    $("beside").hidden = !data.compared.length;
    $("controls").hidden = false;
    restore();
    for (const name of CONTROLS) {
      $(name).addEventListener(name === "text" || name === "from" || name === "to" ? "input" : "change", () => { keep(); repaint(); choose(); });
    }
    repaint();
    choose();
    document.documentElement.dataset.ready = "true";
  }

  start().catch(error => { $("count").textContent = `The responses cannot be shown: ${error.message}. This needs a browser of 2023 or later.`; });
})();

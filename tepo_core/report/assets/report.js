"use strict";
(function () {
  const root = document.documentElement;
  const button = document.getElementById("theme");
  const dark = () => root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  const name = () => { button.textContent = dark() ? "Light mode" : "Dark mode"; };
  button.addEventListener("click", () => { root.dataset.theme = dark() ? "light" : "dark"; name(); });
  name();

  function save(content, type, file) {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([content], { type }));
    link.download = file;
    document.body.append(link);
    link.click();
    link.remove();
    setTimeout(() => URL.revokeObjectURL(link.href), 2000);
  }
  for (const b of document.querySelectorAll("button.download"))
    b.addEventListener("click", () => save(document.getElementById("csv-" + b.dataset.csv).textContent, "text/csv", b.dataset.csv + ".csv"));
  for (const b of document.querySelectorAll("button.save-svg"))
    b.addEventListener("click", () => {
      const svg = b.closest("figure").querySelector("svg").cloneNode(true);
      svg.setAttribute("xmlns", "http://www.w3.org/2000/svg");
      save('<?xml version="1.0"?>\n' + svg.outerHTML.replaceAll("currentColor", "#1b1f24"), "image/svg+xml", b.dataset.name + ".svg");
    });

  const key = (row, i) => {
    const text = row.cells[i].dataset.sort;
    if (text === "inf" || text === "-inf") return Infinity; // nothing to show sorts last, either way
    return text !== "" && !isNaN(text) ? Number(text) : text;
  };
  const compare = (a, b) => typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b));
  for (const table of document.querySelectorAll("table.sortable")) {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((th, i) => th.querySelector("button").addEventListener("click", () => {
      const down = th.getAttribute("aria-sort") !== "descending" && (th.getAttribute("aria-sort") === "ascending" || th.classList.contains("num"));
      heads.forEach(h => h.removeAttribute("aria-sort"));
      th.setAttribute("aria-sort", down ? "descending" : "ascending");
      const rows = [...table.tBodies[0].rows].map((row, n) => [key(row, i), n, row]);
      rows.sort((a, b) => {
        if (a[0] === Infinity || b[0] === Infinity) return (a[0] === Infinity) - (b[0] === Infinity) || a[1] - b[1];
        return (down ? -1 : 1) * compare(a[0], b[0]) || a[1] - b[1];
      });
      table.tBodies[0].append(...rows.map(r => r[2]));
    }));
  }

  const data = document.getElementById("token-data");
  if (!data) return;
  const all = JSON.parse(data.textContent);
  const pick = id => document.getElementById(id);
  const [task, method, field] = [pick("token-task"), pick("token-method"), pick("token-field")];
  const view = pick("token-view"), scale = pick("token-scale");
  const kinds = { decisive: "213,94,0", digit: "0,114,178", copied: "122,122,122", format: "180,180,180" };
  const signed = { entropy_change: 0, advantage: 0, ratio: 1 };
  const fill = (select, values) => select.replaceChildren(...values.map(v => new Option(v, v)));
  const unique = values => [...new Set(values)];
  const chosen = () => all.filter(r => r.task === task.value && r.method === method.value);

  function largest(responses, f) {
    const centre = signed[f] || 0;
    const sizes = responses.flatMap(r => r.tokens[f]).filter(v => v !== null).map(v => Math.abs(v - centre)).sort((a, b) => a - b);
    return sizes.length ? Math.max(sizes[Math.floor(0.98 * (sizes.length - 1))], 1e-12) : 1;
  }
  function shade(f, value, top, kind) {
    if (f === "kind") return kind in kinds ? `rgba(${kinds[kind]},.45)` : "transparent";
    if (value === null) return "transparent";
    const centre = signed[f] || 0, strength = Math.min(1, Math.abs(value - centre) / top) * 0.75;
    const hue = !(f in signed) || value >= centre ? "213,94,0" : "0,114,178";
    return `rgba(${hue},${strength.toFixed(3)})`;
  }
  const show = v => v === null ? "–" : Number(v.toPrecision(3)).toString();
  function response(r, f, top) {
    const box = document.createElement("div");
    box.className = "response";
    const head = document.createElement("p");
    head.className = "muted";
    head.textContent = `${r.correct ? "right" : "wrong"} answer to ${r.prompt}`;
    const text = document.createElement("p");
    text.className = "text";
    text.tabIndex = 0;
    text.setAttribute("role", "group");
    text.setAttribute("aria-label", "Response, left and right arrow keys move between tokens: " + r.tokens.text.join(""));
    const out = document.createElement("p");
    out.className = "readout";
    out.setAttribute("aria-live", "polite");
    let at = -1;
    const read = i => {
      at = i;
      const t = r.tokens;
      const word = t.text[i] === "" ? "end of response" : JSON.stringify(t.text[i]);
      out.textContent = `${word}${t.kind[i] ? ", " + t.kind[i] : ""}: entropy ${show(t.entropy[i])}, change ${show(t.entropy_change[i])}, ratio ${show(t.ratio[i])}, ` +
        `advantage ${show(t.advantage[i])}, gradient ${show(t.gradient[i])}${t.mask[i] ? ", in the mask" : ""}${t.clipped[i] ? ", clipped" : ""}`;
    };
    r.tokens.text.forEach((word, i) => {
      const span = document.createElement("span");
      span.className = "token" + (r.tokens.mask[i] ? " masked" : "") + (word === "" ? " end" : "");
      span.textContent = word === "" ? "∎" : word;
      span.style.backgroundColor = shade(f, f === "kind" ? null : r.tokens[f][i], top, r.tokens.kind[i]);
      span.addEventListener("pointerenter", () => read(i));
      span.addEventListener("click", () => read(i));
      text.append(span);
    });
    text.addEventListener("keydown", e => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[e.key];
      if (!step) return;
      e.preventDefault();
      const next = Math.min(Math.max(at + step, 0), r.tokens.text.length - 1);
      for (const s of text.children) s.style.outline = "";
      text.children[next].style.outline = "2px solid";
      read(next);
    });
    if (r.cut) out.textContent = "Cut: the response is longer.";
    box.append(head, text, out);
    return box;
  }
  function draw() {
    const f = field.value, responses = chosen(), top = f === "kind" ? 1 : largest(responses, f);
    const words = { kind: "Orange decisive, blue other computed digits, grey copied, light grey format.", mask: "Orange: in the mask.", clipped: "Orange: clipped." };
    scale.textContent = words[f] || (f in signed ? `Orange above ${signed[f]}, blue below; full colour at a distance of ${show(top)} or more.` : `Full colour at ${show(top)} or more.`);
    view.className = "views";
    view.replaceChildren(...unique(responses.map(r => r.moment)).map(moment => {
      const part = document.createElement("div"), head = document.createElement("h3");
      const mine = responses.filter(r => r.moment === moment);
      head.textContent = `${moment} training (rollout ${mine[0].step}, seed ${mine[0].seed})`;
      part.append(head, ...mine.map(r => response(r, f, top)));
      return part;
    }));
  }
  fill(task, unique(all.map(r => r.task)));
  const methods = () => fill(method, unique(all.filter(r => r.task === task.value).map(r => r.method)));
  task.addEventListener("change", () => { methods(); draw(); });
  method.addEventListener("change", draw);
  field.addEventListener("change", draw);
  methods();
  draw();
})();

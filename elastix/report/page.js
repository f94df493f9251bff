// Unpacks plotly, draws the figures in the colours of the page, sorts tables. No network.
"use strict";

let figures = {};
const source = document.documentElement.dataset.source; // of a page that is served
let version = document.documentElement.dataset.version;

async function unpack(id) {
  const packed = document.getElementById(id);
  const bytes = Uint8Array.from(atob(packed.textContent), (c) => c.charCodeAt(0));
  packed.remove();
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
}

async function load() {
  figures = JSON.parse(await unpack("figures"));
  if (Object.keys(figures).length === 0 && !source) return;
  const script = document.createElement("script");
  script.nonce = document.querySelector("script[nonce]").nonce;
  script.textContent = await unpack("plotly");
  document.head.append(script);
}

function palette() {
  const style = getComputedStyle(document.documentElement);
  const read = (name) => style.getPropertyValue(name).trim();
  return (name) => read(/^\d+$/.test(name) ? `--s${name}` : `--${name}`);
}

// "@name" stands for a colour, and only where a colour is expected: a user's text may look alike.
function painted(value, colour, expected) {
  if (Array.isArray(value)) return value.map((item) => painted(item, colour, expected));
  if (value !== null && typeof value === "object") {
    return Object.fromEntries(
      Object.entries(value).map(([key, item]) => [key, painted(item, colour, /color$/.test(key))]),
    );
  }
  return expected && typeof value === "string" && value.startsWith("@") ? colour(value.slice(1)) : value;
}

function axis(given, colour) {
  return {
    gridcolor: colour("grid"), linecolor: colour("line"), zerolinecolor: colour("grid"),
    automargin: true, ...given,
    title: { standoff: 8, ...(given?.title || {}) },
  };
}

function layout(given, colour) {
  const axes = Object.fromEntries(
    Object.entries(given).filter(([key]) => /^[xy]axis/.test(key)).map(([key, value]) => [key, axis(value, colour)]),
  );
  return {
    paper_bgcolor: colour("card"), plot_bgcolor: colour("card"),
    font: { color: colour("text"), family: getComputedStyle(document.body).fontFamily, size: 12 },
    margin: { l: 52, r: 14, t: 26, b: 44 },
    modebar: { bgcolor: "transparent", color: colour("grid"), activecolor: colour("muted") },
    legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0 },
    hoverlabel: { bgcolor: colour("card"), bordercolor: colour("line"), font: { color: colour("text") }, align: "left" },
    colorway: [...Array(8).keys()].map((i) => colour(String(i))),
    xaxis: axis({}, colour), yaxis: axis({}, colour),
    ...given, ...axes,
  };
}

const options = {
  responsive: true, displaylogo: false, showSendToCloud: false, plotlyServerURL: "", displayModeBar: innerWidth < 700 ? false : "hover",
  modeBarButtonsToRemove: ["lasso2d", "select2d", "zoomIn2d", "zoomOut2d", "autoScale2d"],
};

async function draw(wanted = () => true) {
  const colour = palette();
  for (const [id, figure] of Object.entries(figures)) {
    if (!wanted(id)) continue;
    const { data, layout: given } = painted(figure, colour, false);
    const whole = layout(given, colour);
    whole.showlegend = whole.showlegend ?? data.filter((trace) => trace.showlegend !== false && trace.name).length > 1;
    whole.uirevision = id;
    await Plotly.react(document.getElementById(id), data, whole, options);
  }
  document.documentElement.dataset.drawn = Object.keys(figures).length;
  for (const box of document.querySelectorAll(scrolled)) hint(box);
}

// Whoever reads a table or a plot on a narrow screen is to see that it goes on to the right.
const scrolled = ".scroll, .plot-scroll";

function hint(box) {
  box.toggleAttribute("data-more", box.scrollWidth - box.clientWidth - box.scrollLeft > 2);
}

document.addEventListener("scroll", ({ target }) => target.matches?.(scrolled) && hint(target), { capture: true, passive: true });
addEventListener("resize", () => document.querySelectorAll(scrolled).forEach(hint));

function key(cell) {
  const text = cell.dataset.key ?? cell.textContent;
  const number = Number(text);
  return text !== "" && !Number.isNaN(number) ? number : text;
}

function sort(header) {
  const body = header.closest("table").tBodies[0];
  const column = [...header.parentNode.children].indexOf(header);
  const down = header.getAttribute("aria-sort") === "ascending";
  const sign = down ? -1 : 1;
  const rows = [...body.rows].map((row) => [key(row.cells[column]), row]);
  rows.sort(([a], [b]) => {
    if (a === "" || b === "") return (a === "") - (b === ""); // what is not known comes last
    if (typeof a === typeof b) return sign * (a < b ? -1 : a > b ? 1 : 0);
    return typeof a === "number" ? -1 : 1;
  });
  for (const other of header.parentNode.children) other.removeAttribute("aria-sort");
  header.setAttribute("aria-sort", down ? "descending" : "ascending");
  body.append(...rows.map(([, row]) => row));
}

document.addEventListener("click", (event) => {
  const button = event.target.closest("table.sortable th button");
  if (button) sort(button.closest("th"));
});

// How a node is found again: its id, a row by its first cell, anything else by what it is.
function named(node) {
  return node.id || (node.nodeName === "TR" && node.cells[0]?.tagName === "TD" && key(node.cells[0])) || node.nodeName;
}

// Make a node like another one, touching only what differs: a link stays the one under the mouse.
function become(old, fresh) {
  if (old.isEqualNode(fresh)) return;
  if (old.nodeType !== Node.ELEMENT_NODE) {
    old.data = fresh.data;
    return;
  }
  if (old.matches(".plot")) return; // drawn anew, and keeps its zoom
  for (const { name } of [...old.attributes]) if (!fresh.hasAttribute(name)) old.removeAttribute(name);
  for (const { name, value } of fresh.attributes) if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  const known = new Map();
  for (const child of old.childNodes) {
    const name = named(child);
    known.set(name, [...(known.get(name) ?? []), child]);
  }
  let place = old.firstChild;
  for (const child of [...fresh.childNodes]) {
    const same = known.get(named(child))?.shift();
    if (same) become(same, child);
    if (same && same === place) place = place.nextSibling;
    else old.insertBefore(same ?? child, place);
  }
  for (const gone of [...known.values()].flat()) gone.remove();
}

// What a person did to the page stays: plots keep their zoom, tables their order, lists their place.
function exchange(fresh) {
  for (const header of document.querySelectorAll("th[aria-sort]")) {
    const column = [...header.parentNode.children].indexOf(header);
    const same = fresh.getElementById(header.closest("table").id)?.tHead.rows[0].cells[column];
    if (!same) continue;
    sort(same);
    if (header.getAttribute("aria-sort") === "descending") sort(same);
  }
  for (const part of ["header", "nav", "main", "footer"]) {
    become(document.querySelector(part), fresh.querySelector(part));
  }
}

async function refresh() {
  if (document.hidden) return;
  const answer = await fetch(`${source}?seen=${encodeURIComponent(version)}`);
  if (!answer.ok) throw new Error(await answer.text());
  if (answer.status === 204) return;
  const news = await answer.json();
  version = news.version;
  const before = figures;
  figures = news.figures;
  exchange(new DOMParser().parseFromString(news.html, "text/html"));
  await draw((id) => JSON.stringify(before[id]) !== JSON.stringify(figures[id]));
  document.documentElement.dataset.version = version;
}

async function follow() {
  const note = () => document.getElementById("live");
  for (;;) {
    try {
      await refresh();
    } catch (error) {
      if (note()) note().textContent = `This is how it stood: ${error.message || error}. It is asked for again.`;
    }
    await new Promise((after) => setTimeout(after, 2000));
  }
}
document.getElementById("reload")?.addEventListener("click", () => location.reload());

load().then(() => draw()).then(() => {
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => draw());
  if (source) follow();
}).catch((error) => {
  const told = document.createElement("p");
  told.className = "note";
  told.textContent = `The plots cannot be drawn: ${error}. They need a browser of 2023 or later.`;
  document.querySelector("main").prepend(told);
  document.documentElement.dataset.failed = String(error);
});

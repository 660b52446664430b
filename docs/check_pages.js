// SPDX-License-Identifier: MIT
// Load each page in a frame of each width and in each theme, and leave what is wrong with it as the text of this page.

const CODE = "pre, .highlight, .sd-tab-set > label, math";
const NO_TEXT = "pre, script, style, svg, math, .sd-tab-set > input, .headerlink, .copybtn";
const LEAST_CONTRAST = 3;
const WIDE = 1200; // where code has room for the lines that examples have

function name(element) {
  const text = (element.textContent || "").trim().replace(/\s+/g, " ").slice(0, 50);
  return `${element.tagName.toLowerCase()}${element.className ? "." + String(element.className).split(" ")[0] : ""} "${text}"`;
}

function rgba(color) {
  const numbers = color.match(/[\d.]+/g).map(Number);
  return numbers.length === 3 ? [...numbers, 1] : numbers;
}

function luminance([r, g, b]) {
  const linear = [r, g, b].map((x) => x / 255).map((x) => (x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4));
  return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
}

function contrast(one, other) {
  const [low, high] = [luminance(one), luminance(other)].sort((a, b) => a - b);
  return (high + 0.05) / (low + 0.05);
}

function behind(view, element) {
  for (let at = element; at; at = at.parentElement) {
    const color = rgba(view.getComputedStyle(at).backgroundColor);
    if (color[3] > 0.5) return color;
  }
  return [255, 255, 255, 1];
}

function wide(view, body) {
  const found = [];
  const root = view.document.documentElement;
  if (root.scrollWidth > root.clientWidth + 1) found.push(`the page is ${root.scrollWidth} px wide`);
  for (const element of body.querySelectorAll("*")) {
    const style = view.getComputedStyle(element);
    const scrolls = ["auto", "scroll"].includes(style.overflowX) && element.scrollWidth > element.clientWidth + 1;
    if (scrolls && element.clientWidth && !element.closest(CODE)) {
      found.push(`${element.scrollWidth} px in ${element.clientWidth} px scroll sideways: ${name(element)}`);
    }
  }
  return found;
}

function cut(view, body) {
  const wide = view.innerWidth >= WIDE ? [...body.querySelectorAll("pre")] : [];
  return wide.filter((pre) => pre.scrollWidth > pre.clientWidth + 1).map((pre) => `code is cut: ${longest(pre)}`);
}

function longest(pre) {
  return pre.textContent.split("\n").reduce((one, other) => (other.length > one.length ? other : one)).trim();
}

function faded(view, element) {
  let opacity = 1;
  for (let at = element; at; at = at.parentElement) opacity *= Number(view.getComputedStyle(at).opacity);
  return opacity;
}

function pale(view, article) {
  const found = [];
  const texts = view.document.createTreeWalker(article, view.NodeFilter.SHOW_TEXT);
  for (let text = texts.nextNode(); text; text = texts.nextNode()) {
    const element = text.parentElement;
    if (!text.textContent.trim() || element.closest(NO_TEXT) || !element.getClientRects().length) continue;
    const under = behind(view, element), opacity = faded(view, element);
    const color = rgba(view.getComputedStyle(element).color);
    const alpha = color[3] * opacity;
    const ratio = contrast([0, 1, 2].map((i) => alpha * color[i] + (1 - alpha) * under[i]), under);
    if (ratio < LEAST_CONTRAST) found.push(`contrast ${ratio.toFixed(1)}: ${name(element)}`);
  }
  return found;
}

function boxed(view, image, theme) {
  const canvas = view.document.createElement("canvas");
  canvas.width = canvas.height = 20;
  const context = canvas.getContext("2d");
  context.drawImage(image, 0, 0, 20, 20);
  const corner = [...context.getImageData(0, 0, 1, 1).data];
  const apart = contrast(corner, behind(view, image.parentElement)) > 4;
  return theme === "dark" && corner[3] > 200 && apart ? ["a light box around a picture"] : [];
}

async function pictures(view, article, theme) {
  const found = [];
  for (const image of article.querySelectorAll("img")) {
    if (!image.getClientRects().length) continue;
    image.loading = "eager";
    await image.decode().catch(() => null);
    const file = image.src.split("/").pop();
    if (!image.naturalWidth) found.push(`no picture ${file}`);
    else found.push(...boxed(view, image, theme).map((what) => `${what}: ${file}`));
    if (!image.alt || image.alt.startsWith("_")) found.push(`no alternative text: ${file}`);
  }
  return found;
}

async function shown(address, width) {
  const frame = document.createElement("iframe");
  frame.style.cssText = `width: ${width}px; height: 900px; border: 0`;
  frame.src = address;
  const loaded = new Promise((resolve) => frame.addEventListener("load", resolve));
  document.body.append(frame);
  await loaded;
  return frame;
}

async function search(words, page) {
  const frame = await shown(`/search.html?q=${encodeURIComponent(words)}`, 1366);
  let first = null;
  for (let turn = 0; turn < 100 && !first; turn++) {
    await new Promise((resolve) => setTimeout(resolve, 50));
    first = frame.contentDocument.querySelector("#search-results ul.search li a");
  }
  const found = first ? new URL(first.href).pathname : "nothing";
  frame.remove();
  return found === `/${page}.html` ? [] : [{ page: "search.html", how: `"${words}"`, what: `${found} before /${page}.html` }];
}

async function look(page, width, theme) {
  const frame = await shown(`/${page}`, width);
  const view = frame.contentWindow, body = frame.contentDocument.body;
  for (const details of body.querySelectorAll("details")) details.open = true;
  const article = frame.contentDocument.querySelector("article") || body;
  const dark = luminance(behind(view, article)) < 0.2;
  const found = dark === (theme === "dark") ? [] : [`the theme is not ${theme}`];
  found.push(...(await pictures(view, article, theme)), ...wide(view, body), ...cut(view, body), ...pale(view, article));
  frame.remove();
  return [...new Set(found)].map((what) => ({ page, how: `${width} px, ${theme}`, what }));
}

async function main() {
  const found = [];
  for (const theme of settings.themes) {
    localStorage.setItem("theme", theme);
    for (const page of settings.pages) {
      const all = await Promise.all(settings.widths.map((width) => look(page, width, theme)));
      found.push(...all.flat());
    }
  }
  for (const [words, page] of settings.searches) found.push(...(await search(words, page)));
  return found;
}

main()
  .catch((error) => [{ page: "all", how: "all", what: `the check itself failed: ${error.stack}` }])
  .then((found) => (document.body.textContent = JSON.stringify(found)));

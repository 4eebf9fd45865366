// What is wrong with the layout of a page, as texts; none of it where all is well. An expression for Browser.run.
(() => {
  const NEAR = 1.5, LONGEST = 12, NEIGHBORS = 12, WORDS = 6000;
  const problems = [];
  const say = (what, element) => {
    if (problems.length < 20) problems.push(`${what}: ${element.outerHTML.replace(/base64,[^"]*/g, "").slice(0, 200)}`);
  };
  const style = element => getComputedStyle(element);
  const scrolls = element => /auto|scroll/.test(style(element).overflowX + style(element).overflowY);
  const inFlow = element => /static|relative|sticky/.test(style(element).position) &&
    !/inline|none|contents/.test(style(element).display);
  const forReaders = new Set();  // elements for screen readers alone, with all inside
  for (const element of document.body.querySelectorAll("*")) {
    if (forReaders.has(element.parentElement) || style(element).clipPath !== "none") forReaders.add(element);
  }
  const every = [...document.body.querySelectorAll("*")].filter(one =>
    !forReaders.has(one) && !one.closest(".symbols, .skip") && one.checkVisibility({visibilityProperty: true}));
  const html = every.filter(one => one instanceof HTMLElement);
  const shown = new Set(html);

  if (document.scrollingElement.scrollWidth > innerWidth) {
    say(`the page is ${document.scrollingElement.scrollWidth} wide in a window of ${innerWidth}`, document.body);
  }

  for (const one of html) {
    const mine = one.getBoundingClientRect(), around = one.parentElement, outer = around.getBoundingClientRect();
    if (inFlow(one) && !/inline/.test(style(around).display) && !scrolls(around) &&
        (mine.left < outer.left - NEAR || mine.right > outer.right + NEAR ||
         mine.top < outer.top - NEAR || mine.bottom > outer.bottom + NEAR)) say("leaves its box", one);
    const flowing = [...one.children].filter(child => shown.has(child) && inFlow(child)).slice(0, 200);
    const boxes = flowing.map(child => child.getBoundingClientRect());
    boxes.forEach((a, at) => boxes.slice(at + 1, at + 1 + NEIGHBORS).forEach((b, by) => {
      const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
      const high = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
      if (wide > NEAR && high > NEAR) say(`is overlapped by its neighbor ${by + 1}`, flowing[at]);
    }));
    if (one.clientWidth && one.textContent.trim() && !scrolls(one) &&
        (one.scrollWidth > one.clientWidth + NEAR ||
         (/hidden|clip/.test(style(one).overflowY) && one.scrollHeight > one.clientHeight + NEAR))) say("is cut off", one);
    if (one.tagName === "IMG" && !(one.complete && one.naturalWidth)) say("is not shown", one);
  }

  // Words stay whole.
  const visible = new Set(every), range = document.createRange();
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  let left = WORDS;
  while (left > 0 && walker.nextNode()) {
    const node = walker.currentNode;
    if (!visible.has(node.parentElement) || node.parentElement.closest("svg")) continue;
    for (const found of node.data.matchAll(/[A-Za-z0-9]+/g)) {
      if (found[0].length > LONGEST || left-- <= 0) continue;
      range.setStart(node, found.index);
      range.setEnd(node, found.index + found[0].length);
      const lines = [...range.getClientRects()];
      if (lines.some(one => Math.abs(one.top - lines[0].top) > NEAR)) say(`breaks "${found[0]}"`, node.parentElement);
    }
  }

  // Words of a plot lie in it, and on no others.
  for (const plot of document.querySelectorAll("svg.plot")) {
    const outer = plot.getBoundingClientRect(), words = [...plot.querySelectorAll("text")];
    const boxes = words.map(one => one.getBoundingClientRect());
    boxes.forEach((a, at) => {
      if (a.left < outer.left || a.right > outer.right || a.top < outer.top || a.bottom > outer.bottom) {
        say("leaves the plot", words[at]);
      }
      boxes.slice(at + 1).forEach((b, by) => {
        const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
        const high = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
        if (wide > 0 && high > 4) say(`lies on "${words[at + 1 + by].textContent}"`, words[at]);
      });
    });
  }

  // Text can be read: WCAG's contrast of 4.5 with what is behind it.
  const levels = text => {
    const numbers = text.match(/[\d.]+(e-?\d+)?/g).map(Number);
    return text.startsWith("color(") ? [...numbers.slice(0, 3).map(one => 255 * one), numbers[3] ?? 1]
      : [...numbers.slice(0, 3), numbers[3] ?? 1];
  };
  const luminance = color => {
    const [r, g, b] = color.slice(0, 3).map(one => one / 255).map(
      one => one <= .04045 ? one / 12.92 : ((one + .055) / 1.055) ** 2.4);
    return .2126 * r + .7152 * g + .0722 * b;
  };
  const ground = element => {
    for (let one = element; one; one = one.parentElement) {
      const color = levels(style(one).backgroundColor.replace("transparent", "rgba(0, 0, 0, 0)"));
      if (color[3] === 1) return color;
    }
    return [255, 255, 255, 1];
  };
  const known = new Set();
  for (const one of every) {
    if (![...one.childNodes].some(node => node.nodeType === Node.TEXT_NODE && node.data.trim())) continue;
    const ink = one instanceof SVGElement ? style(one).fill : style(one).color;
    const behind = ground(one), pair = `${ink} on ${behind}`;
    if (known.has(pair)) continue;
    known.add(pair);
    const [low, high] = [luminance(levels(ink)), luminance(behind)].sort((a, b) => a - b);
    if ((high + .05) / (low + .05) < 4.5) say(`is hard to read, ${pair}`, one);
  }
  return problems;
})()

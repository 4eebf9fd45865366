// Search, filters, order and pages of cards, and order of tables. Without it a page shows its first cards and all else.
// Texts of others reach the page as text only: nothing here parses HTML.
(() => {
  "use strict";
  const SHOWN = 60;  // cards at a time
  const numbers = new Intl.NumberFormat("en");
  const at = id => document.getElementById(id);
  const make = (tag, kind, text) => {
    const made = document.createElement(tag);
    if (kind) made.className = kind;
    if (text !== undefined) made.textContent = text;
    return made;
  };

  // ---- tables: a button in each head ----

  const value = (row, column) => {
    const text = row.cells[column].textContent.trim(), number = Number(text.replace(/[,%+]/g, ""));
    return text === "" ? null : Number.isNaN(number) ? text : number;
  };
  const compare = (a, b) => a === b ? 0 : a === null ? 1 : b === null ? -1 :
    typeof a === typeof b && typeof a === "number" ? a - b : String(a).localeCompare(String(b), "en", {numeric: true});
  for (const table of document.querySelectorAll(".scroll table")) {
    const body = table.tBodies[0];
    if (!table.tHead || body.rows.length < 3) continue;
    [...table.tHead.rows[0].cells].forEach((head, column) => {
      const button = make("button", "order", head.textContent);
      button.type = "button";
      head.replaceChildren(button);
      button.addEventListener("click", () => {
        const down = head.getAttribute("aria-sort") === "ascending";
        for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        const rows = [...body.rows].map(row => [value(row, column), row]);
        rows.sort(([a], [b]) => a === null || b === null ? compare(a, b) : down ? compare(b, a) : compare(a, b));
        body.append(...rows.map(([, row]) => row));
      });
    });
  }

  // ---- cards ----

  const box = at("cards"), find = at("find"), source = at("cards-data");
  if (!box || !find || !source) return;
  const data = JSON.parse(source.textContent);
  const cards = data.cards, nodes = new Map([...box.children].map((node, number) => [number, node]));
  // Of a card: n name, c captions, e findings, g groups, v values, and more if HTML has it not (see finder.py).
  cards.forEach((card, number) => {
    card.number = number;
    const said = [card.n, ...(card.c || []).map(one => one[0]), ...(card.e || []).map(one => one[1])];
    card.words = said.join(" ").toLowerCase();
  });
  const address = short => `data:image/${short.replace(",", ";base64,")}`;
  // May break after directories and inside of long names, as the filter `breakable` of templates lets them.
  const UNBROKEN = 16;
  const pieces = part => {
    const found = [];
    let line = [];
    for (const word of [...part].length <= UNBROKEN ? [part] : part.split(/(?<=[^_-][_-])/)) {
      const letters = [...word];
      if (line.length && line.length + letters.length > UNBROKEN) found.push(line.splice(0));
      line.push(...letters);
      while (line.length > UNBROKEN) found.push(line.splice(0, UNBROKEN));
    }
    return [...found, line].map(one => one.join(""));
  };
  const breakable = words => {
    const made = make("bdi");
    words.split(" ").forEach((word, place) => {
      if (place) made.append(" ");
      word.split(/(?<=[^/]\/)/).flatMap(pieces).forEach((piece, number) => {
        if (number) made.append(make("wbr"));
        made.append(piece);
      });
    });
    return made;
  };
  // A card is a copy of the template's, filled, without what it has not.
  const each = (first, values, fill) => {
    for (const value of values || []) {
      const copy = first.cloneNode(true);
      fill(copy, value);
      first.before(copy);
    }
    first.remove();
  };
  const set = (element, values) => {
    for (const [name, value] of Object.entries(values)) element.setAttribute(name, value);
  };
  const fillShot = (outer, card) => {
    const picture = outer.querySelector("svg, img"), whole = picture.querySelector(".whole") || picture;
    if (picture === whole) picture.alt = card.n;
    else {
      const [width, height] = card.z;
      set(picture, {viewBox: `0 0 ${width} ${height}`, width, height, "aria-label": card.n});
      each(picture.querySelector(".overlay"), card.b, (box, [left, top, width, height, kinds, shade]) => {
        const one = kinds.split(" ");
        set(box, {class: ["overlay", ...one.filter(kind => kind === "flip" || kind === "coarse")].join(" "),
                  x: `${left}%`, y: `${top}%`, width: `${width}%`, height: `${height}%`});
        if (shade) set(box.querySelector(".shade"), {href: address(shade)});
        else box.querySelector(".shade").remove();
        if (!one.includes("alone") || !one.includes("outlined")) box.querySelector(".outside").remove();
        if (!one.includes("outlined")) box.querySelector(".crop").remove();
      });
    }
    if (card.a) set(whole, {[whole === picture ? "src" : "href"]: address(card.a)});
    else {
      whole.remove();
      outer.append(make("span", "instead", card.i));
    }
  };
  const build = card => {
    const made = at("card-template").content.firstElementChild.cloneNode(true), part = name => made.querySelector(name);
    if (card.t) made.classList.add(card.t);
    const both = part(".both"), shots = both.querySelectorAll(".shot");
    fillShot(shots[0], card);
    if (card.d) fillShot(shots[1], card.d);
    else both.replaceWith(shots[0]);
    part(".name bdi").replaceWith(breakable(card.n));
    each(part(".caption"), card.c, (line, [words, letters]) => {
      line.querySelector("bdi").textContent = words;
      if (letters) line.querySelector(".aside").textContent = ` … ${numbers.format(letters)} characters in all`;
      else line.querySelector(".aside").remove();
    });
    if (card.m) part(".more").textContent = `and ${numbers.format(card.m)} more captions`;
    else part(".more").remove();
    each(part(".references li"), card.r, (line, one) => {
      set(line, {value: one.k});
      line.querySelector(".label").textContent = `Reference ${one.k}`;
      fillShot(line.querySelector(".shot"), one);
      line.querySelector("bdi").replaceWith(breakable(one.n));
      line.querySelector(".facts").textContent = one.x;
    });
    if (!card.r) part(".references").remove();
    each(part(".findings li"), card.e, (line, [severity, code, detail]) => {
      line.className = severity;
      set(line.querySelector("use"), {href: `#icon-${severity}`});
      line.querySelector(".aside").textContent = `${severity}: `;
      line.querySelector("code").textContent = code;
      line.querySelector("bdi").replaceWith(breakable(detail));
    });
    if (!card.e) part(".findings").remove();
    const facts = (card.x || []).flatMap((fact, number) => [number ? " · " : "", make("span", "", fact)]);
    part(".about > .facts:not(.more, .trains)").replaceChildren(...facts);
    if (card.p === undefined) part(".trains").remove();
    else {
      const percent = Math.round(100 * card.p);
      set(part(".meter"), {"aria-label": `${percent} percent`});
      set(part(".meter rect"), {width: 100 * card.p});
      part(".trains span").textContent = `${percent}% trains`;
    }
    return made;
  };
  const node = card => {
    if (!nodes.has(card.number)) nodes.set(card.number, build(card));
    return nodes.get(card.number);
  };

  // ---- what is shown ----

  const words = at("find-words"), order = at("find-order"), said = at("find-said");
  const filters = [...find.querySelectorAll("select[data-group]")];
  const pages = [...document.querySelectorAll(".card-pages")];
  let page = 0, left = cards;
  filters.forEach((select, group) => {
    const names = data.groups[group] || [], counts = new Array(names.length).fill(0);
    for (const card of cards) counts[card.g[group]] += 1;
    const order = [...names.keys()].sort((a, b) => compare(names[a], names[b]));
    for (const place of order) {
      const option = make("option", "", `${names[place]} (${numbers.format(counts[place])})`);
      option.value = place;
      select.append(option);
    }
    select.closest("label").hidden = names.length < 2;
  });
  const show = () => {
    const count = Math.max(1, Math.ceil(left.length / SHOWN)), first = page * SHOWN;
    const some = left.slice(first, first + SHOWN);
    box.replaceChildren(...some.map(node));
    said.textContent = !left.length ? "No sample fits." :
      `Samples ${numbers.format(first + 1)} to ${numbers.format(first + some.length)} of ${numbers.format(left.length)}` +
      (left.length < cards.length ? `, from ${numbers.format(cards.length)}` : "") + ".";
    for (const nav of pages) {
      nav.hidden = count < 2;
      nav.querySelector("[data-step='-1']").disabled = page === 0;
      nav.querySelector("[data-step='1']").disabled = page === count - 1;
      nav.querySelector("output").textContent = `Page ${numbers.format(page + 1)} of ${numbers.format(count)}`;
    }
  };
  const choose = () => {
    const wanted = words.value.toLowerCase().split(/\s+/).filter(Boolean);
    left = cards.filter(card => wanted.every(word => card.words.includes(word)) &&
      filters.every((select, group) => !select.value || Number(select.value) === card.g[group]));
    if (order.value !== "") {
      const by = Number(order.value), [named, descending] = data.orders[by], down = descending ? -1 : 1;
      const key = card => named ? card.n : card.v[by];
      left = [...left].sort((a, b) => key(a) === key(b) ? a.number - b.number : key(a) === null ? 1 :
        key(b) === null ? -1 : named ? down * compare(key(a), key(b)) : down * (key(a) - key(b)));
    }
    page = 0;
    show();
  };
  let waiting = 0;
  words.addEventListener("input", () => { clearTimeout(waiting); waiting = setTimeout(choose, 120); });
  for (const select of [order, ...filters]) select.addEventListener("change", choose);
  for (const nav of pages) for (const button of nav.querySelectorAll("button")) button.addEventListener("click", () => {
    page += Number(button.dataset.step);
    show();
    if (button.disabled) nav.querySelector("button:not(:disabled)").focus();
    find.scrollIntoView();
  });
  find.hidden = false;
  choose();
})();

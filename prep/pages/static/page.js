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
  // Of a card: n name, c captions, e findings, g groups, v values, and more if HTML has it not (see find.py).
  cards.forEach((card, number) => {
    card.number = number;
    const said = [card.n, ...(card.c || []).map(one => one[0]), ...(card.e || []).map(one => one[1])];
    card.words = said.join(" ").toLowerCase();
  });
  const address = short => `data:image/${short.replace(",", ";base64,")}`;

  const space = document.querySelector("svg").namespaceURI;
  const icon = tone => {
    const svg = document.createElementNS(space, "svg"), use = document.createElementNS(space, "use");
    svg.setAttribute("class", "icon");
    svg.setAttribute("aria-hidden", "true");
    use.setAttribute("href", `#icon-${tone}`);
    svg.append(use);
    return svg;
  };
  const image = (short, name) => {
    const img = make("img");
    img.alt = name;
    img.src = address(short);
    return img;
  };
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
  const text = (kind, inner) => {
    const line = make("p", kind);
    line.append(inner);
    return line;
  };
  const shot = card => {
    const outer = make("div", "shot");
    const inner = card.z ? make("div", "frame") : outer;
    inner.append(card.a ? image(card.a, card.n) : make("span", "instead", card.i));
    if (!card.z) return outer;
    inner.style.setProperty("--wide", card.z[0]);
    inner.style.setProperty("--high", card.z[1]);
    for (const [left, top, width, height, kinds, shade] of card.b || []) {
      const over = make("span", `box ${kinds}`.trim());
      Object.assign(over.style, {left: `${left}%`, top: `${top}%`, width: `${width}%`, height: `${height}%`});
      if (shade) over.append(image(shade, ""));
      if (shade) over.firstChild.className = "shade";
      inner.append(over);
    }
    outer.append(inner);
    return outer;
  };
  const build = card => {
    const figure = make("figure", `card ${card.t || ""}`.trim()), about = make("figcaption");
    if (card.d) {
      const both = make("div", "both");
      both.append(shot(card), shot(card.d));
      figure.append(both);
    } else figure.append(shot(card));
    about.append(text("name", breakable(card.n)));
    for (const [words, letters] of card.c || []) {
      const line = text("caption", make("bdi", "", words));
      line.dir = "auto";
      line.lang = "";
      if (letters) line.append(make("span", "aside", ` … ${numbers.format(letters)} characters in all`));
      about.append(line);
    }
    if (card.m) about.append(make("p", "facts", `and ${numbers.format(card.m)} more captions`));
    if (card.e) {
      const list = make("ul", "findings");
      for (const [severity, code, detail] of card.e) {
        const item = make("li", severity), said = make("span");
        said.append(make("span", "aside", `${severity}: `), make("code", "", code), " ", breakable(detail));
        item.append(icon(severity), said);
        list.append(item);
      }
      about.append(list);
    }
    const facts = make("p", "facts");
    (card.x || []).forEach((fact, number) => facts.append(number ? " · " : "", make("span", "", fact)));
    about.append(facts);
    if (card.p !== undefined) {
      const line = make("p", "facts trains"), meter = make("span", "meter"), fill = make("span");
      meter.setAttribute("role", "img");
      meter.setAttribute("aria-label", `${Math.round(100 * card.p)} percent`);
      fill.style.setProperty("--part", card.p);
      meter.append(fill);
      line.append(meter, make("span", "", `${Math.round(100 * card.p)}% trains`));
      about.append(line);
    }
    figure.append(about);
    return figure;
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

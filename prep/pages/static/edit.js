// Saves captions and masks, and undoes that. Without this script nothing can be edited.
"use strict";
const edit = document.getElementById("edit");

async function send(form, path, type, body) {
  const says = form.querySelector("[role=status]");
  says.textContent = "Saving …";
  let message, answer = null;
  try {
    answer = await fetch(path, {method: "POST", body, headers: {
      "content-type": type, "x-latentry-edit": edit.dataset.token, "x-latentry-plan": form.dataset.plan ?? "",
      "x-latentry-sample": form.dataset.sample ?? edit.dataset.sample ?? "",
      "x-latentry-version": form.dataset.version ?? ""}});
    message = await answer.text();
  } catch {
    message = "No answer: is prep view still running? Nothing was saved.";
  }
  says.textContent = message;
  if (!answer?.ok) return null;
  form.dataset.changed = "";
  return answer;
}

// Shows the page as it is now, and there what was done.
function again(form) {
  sessionStorage.setItem("said", JSON.stringify([form.id, form.querySelector("[role=status]").textContent]));
  location.reload();
}

if (edit) {
  const [told, said] = JSON.parse(sessionStorage.getItem("said") ?? "[]");
  sessionStorage.removeItem("said");
  for (const form of edit.querySelectorAll("form.edit")) {
    form.hidden = false;
    if (form.id === told) {
      form.querySelector("[role=status]").textContent = said;
      form.querySelector("textarea, canvas").focus();
    }
    if (form.dataset.undo && !form.dataset.plan) form.querySelector(".undo").addEventListener("click", async () => {
      if (await send(form, form.dataset.undo, "text/plain", "")) again(form);
    });
  }
  addEventListener("beforeunload", event => {
    if (edit.querySelector("form[data-changed=yes]")) event.preventDefault();
  });
}

// Captions: of a sample's page, or of each card of the list, where a save goes on to the next one.
const cards = [...document.querySelectorAll(".card form.edit")];

// What is there after an answer, where the page stays.
function noted(form, answer) {
  form.dataset.version = answer.headers.get("x-latentry-version");
  form.querySelector(".undo").disabled = answer.headers.get("x-latentry-undo") !== "yes";
}
// Says what became of a model's caption; only one to look at can be judged.
function judged(form, state) {
  if (form.querySelector(".state")) form.querySelector(".state").textContent = state;
  for (const button of form.querySelectorAll(".verdict")) button.hidden = state !== "to look at";
}
const waits = form => form.querySelector(".accept:not([hidden])") && form.dataset.changed !== "yes";

async function accept(form) {
  if (!waits(form)) {
    if (form.dataset.accept) form.querySelector("[role=status]").textContent = form.dataset.changed === "yes" ?
      "These words are not the model's any more: save them." : "There is nothing to accept.";
    return null;
  }
  const answer = await send(form, form.dataset.accept, "text/plain", "");
  if (answer) {
    noted(form, answer);
    judged(form, "accepted");
  }
  return answer;
}

// All that the page shows, one after the other; taken back in the same way.
const every = document.getElementById("accept-all");
if (every) {
  const [button, back] = every.querySelectorAll("button"), says = every.querySelector("[role=status]");
  let done = [];
  const told = (forms, words) => {
    const lost = forms.filter(form => !form).length;
    says.textContent = `${forms.length - lost} ${words}.${lost ? ` ${lost} not: their cards say why.` : ""}`;
    return forms.filter(form => form);
  };
  every.addEventListener("submit", async event => {
    event.preventDefault();
    button.disabled = back.disabled = true;
    const forms = [];
    for (const form of cards) if (waits(form)) forms.push(await accept(form) && form);
    done = told(forms, "accepted");
    button.disabled = false;
    back.disabled = !done.length;
    if (done.length) back.focus();
  });
  back.addEventListener("click", async () => {
    back.disabled = true;
    const forms = [];
    for (const form of done) {
      const answer = form.dataset.changed === "yes" ? null : await send(form, form.dataset.undo, "text/plain", "");
      if (answer) {
        noted(form, answer);
        judged(form, "to look at");
      }
      forms.push(answer && form);
    }
    done = told(forms, "to look at again") && [];
    button.focus();
  });
}

for (const form of document.querySelectorAll("#edit-caption, .card form.edit")) {
  const words = form.querySelector("textarea"), next = cards[cards.indexOf(form) + 1]?.querySelector("textarea");
  form.addEventListener("submit", async event => {
    event.preventDefault();
    const card = cards.includes(form);
    if (!card || form.dataset.changed === "yes") {
      const answer = await send(form, form.action, "text/plain;charset=utf-8", words.value);
      if (!answer) return;
      if (!card) return again(form);
      noted(form, answer);
      judged(form, "changed by a person");
    }
    (next ?? document.querySelector("a[rel=next]"))?.focus();
  });
  words.addEventListener("input", () => form.dataset.changed = "yes");
  words.addEventListener("keydown", event => {
    if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
    if (event.shiftKey) accepted();
    else form.requestSubmit();
  });
  const accepted = async () => {
    if (!await accept(form)) return;
    if (!cards.includes(form)) again(form);
    else (next ?? document.querySelector("a[rel=next]"))?.focus();
  };
  form.querySelector(".accept")?.addEventListener("click", accepted);
  form.querySelector("button.again")?.addEventListener("click", async () => {
    if (await send(form, form.dataset.again, "text/plain", "")) again(form);
  });
}

// Captions that are changed at once: saved as the page shows them, and taken back.
const reword = document.getElementById("reword");
if (reword) {
  const [save, undo] = reword.querySelectorAll("button");
  reword.addEventListener("submit", async event => {
    event.preventDefault();
    save.disabled = true;
    if (await send(reword, reword.action, "text/plain", "")) {
      undo.disabled = false;
      undo.focus();
    } else save.disabled = false;
  });
  undo.addEventListener("click", async () => {
    undo.disabled = true;
    if (await send(reword, reword.dataset.undo, "text/plain", "")) {
      save.disabled = false;
      save.focus();
    } else undo.disabled = false;
  });
}

// A mask is white where the picture trains. It lies over the picture and darkens what does not train.
const painter = document.getElementById("edit-mask");
if (painter) {
  const board = painter.querySelector("canvas"), mark = painter.querySelector(".cursor");
  const view = painter.querySelector(".zoomed"), outline = painter.querySelector(".box");
  const pen = board.getContext("2d"), {tool, shape, size, zoom} = painter.elements;
  const strokes = [], at = {x: board.width / 2, y: board.height / 2};
  let base = null, stroke = null, corner = null;

  const trains = () => tool.value === "trains";
  const color = () => trains() ? "#fff" : "#000";
  const width = () => Number(size.value) * Math.max(board.width, board.height) / 100;

  function draw(one) {
    pen.globalCompositeOperation = one.invert ? "difference" : "source-over";
    pen.fillStyle = pen.strokeStyle = one.color;
    if (one.box) pen.fillRect(...one.box);
    else if (one.fill) fill(one);
    else if (!one.points) pen.fillRect(0, 0, board.width, board.height);
    else {
      pen.lineCap = pen.lineJoin = "round";
      pen.lineWidth = one.width;
      pen.beginPath();
      for (const [x, y] of one.points) pen.lineTo(x, y);
      if (one.points.length === 1) pen.lineTo(one.points[0][0], one.points[0][1] + 0.01);
      pen.stroke();
    }
  }
  // Colors the area around a point that is as light or as dark as the point: rows from left to right, then those beside.
  function fill(one) {
    const wide = board.width, count = wide * board.height, image = pen.getImageData(0, 0, wide, board.height);
    const data = image.data, seen = new Uint8Array(count), starts = [one.fill[1] * wide + one.fill[0]];
    const light = data[4 * starts[0]] > 127, fits = place => !seen[place] && (data[4 * place] > 127) === light;
    while (starts.length) {
      const start = starts.pop();
      if (!fits(start)) continue;
      const first = start - start % wide;
      let left = start, right = start;
      while (left > first && fits(left - 1)) left--;
      while (right < first + wide - 1 && fits(right + 1)) right++;
      seen.fill(1, left, right + 1);
      for (const other of [-wide, wide]) for (let place = left, open = false; place <= right; place++) {
        const found = place + other >= 0 && place + other < count && fits(place + other);
        if (found && !open) starts.push(place + other);
        open = found;
      }
    }
    const value = one.color === "#fff" ? 255 : 0;
    for (let place = 0; place < count; place++) if (seen[place]) data.fill(value, 4 * place, 4 * place + 3);
    pen.putImageData(image, 0, 0);
  }
  function told() {
    painter.dataset.changed = strokes.length ? "yes" : "";
    painter.elements.back.disabled = !strokes.length;
  }
  function redraw() {
    draw({color: "#fff"});
    if (base) pen.drawImage(base, 0, 0, board.width, board.height);
    strokes.forEach(draw);
    told();
  }
  function add(one) {
    strokes.push(one);
    draw(one);
    told();
  }
  // What the pointer, or Space, begins at the brush; a rectangle ends at its other corner.
  function begin() {
    if (shape.value === "brush") add(stroke = {color: color(), width: width(), points: [[at.x, at.y]]});
    else if (shape.value === "fill") add({color: color(), fill: [at.x, at.y].map((one, axis) =>
      Math.min(Math.floor(one), (axis ? board.height : board.width) - 1))});
    else corner = [at.x, at.y];
    follow();
  }
  function end() {
    if (corner) add({color: color(), box: rectangle()});
    stroke = corner = null;
    follow();
  }
  const rectangle = () => [Math.min(corner[0], at.x), Math.min(corner[1], at.y), Math.abs(corner[0] - at.x),
    Math.abs(corner[1] - at.y)];
  function put(element, x, y, wide, high) {
    const sides = {left: x / board.width, top: y / board.height, width: wide / board.width, height: high / board.height};
    for (const [side, part] of Object.entries(sides)) element.style[side] = `${100 * part}%`;
  }
  function follow() {
    const round = shape.value === "brush" ? width() : Math.max(board.width, board.height) / 100;
    put(mark, at.x, at.y, round, round);
    outline.hidden = !corner;
    if (corner) put(outline, ...rectangle());
  }
  function move(x, y) {
    at.x = Math.min(Math.max(x, 0), board.width);
    at.y = Math.min(Math.max(y, 0), board.height);
    follow();
    if (stroke) {
      stroke.points.push([at.x, at.y]);
      draw({...stroke, points: stroke.points.slice(-2)});
    }
  }
  // Scrolls the zoomed picture so that the brush is seen; `centered` also if it is.
  function look(centered) {
    for (const [place, room, scroll, side] of [[at.x / board.width, view.clientWidth, "scrollLeft", board.clientWidth],
      [at.y / board.height, view.clientHeight, "scrollTop", board.clientHeight]]) {
      const seen = place * side - view[scroll];
      if (centered || seen < 0 || seen > room) view[scroll] = place * side - room / 2;
    }
  }
  function pointed(event) {
    const box = board.getBoundingClientRect();
    move((event.clientX - box.left) * board.width / box.width, (event.clientY - box.top) * board.height / box.height);
  }

  board.addEventListener("pointerdown", event => {
    if (event.button) return;
    board.setPointerCapture(event.pointerId);
    pointed(event);
    begin();
  });
  board.addEventListener("pointermove", pointed);
  board.addEventListener("pointerup", end);
  board.addEventListener("pointercancel", () => {
    stroke = corner = null;
    follow();
  });
  board.addEventListener("keydown", event => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const step = Math.max(width() / 2, 1), key = event.key;
    const [x, y] = {ArrowLeft: [-step, 0], ArrowRight: [step, 0], ArrowUp: [0, -step], ArrowDown: [0, step]}[key] ?? [];
    const turned = {"[": [size, -1], "]": [size, 1], "-": [zoom, -0.5], "+": [zoom, 0.5], "=": [zoom, 0.5]}[key];
    const named = {b: "brush", r: "rectangle", f: "fill"}[key];
    if (x !== undefined) {
      if (event.shiftKey && shape.value === "brush") begin();
      move(at.x + x, at.y + y);
      stroke = null;
      look(false);
    } else if (key === " " || key === "Enter") {
      if (!corner) begin();
      else end();
      stroke = null;
    } else if (turned) {
      turned[0].value = Number(turned[0].value) + turned[1];
      turned[0].dispatchEvent(new Event("input"));
    } else if (named) {
      shape.value = named;
      corner = null;
      follow();
    } else if (key === "x") tool.value = trains() ? "not" : "trains";
    else if (key === "z") painter.elements.back.click();
    else if (key === "Escape" && corner) {
      corner = null;
      follow();
    } else return;
    event.preventDefault();
  });
  size.addEventListener("input", follow);
  for (const one of shape) one.addEventListener("change", follow);
  zoom.addEventListener("input", () => {
    painter.querySelector(".board").style.width = `${100 * zoom.value}%`;
    look(true);
  });
  painter.elements.back.addEventListener("click", () => {
    strokes.pop();
    redraw();
  });
  painter.elements.none.addEventListener("click", () => add({color: "#000"}));
  painter.elements.all.addEventListener("click", () => add({color: "#fff"}));
  painter.elements.invert.addEventListener("click", () => add({color: "#fff", invert: true}));
  painter.addEventListener("submit", event => {
    event.preventDefault();
    board.toBlob(async picture => {
      if (await send(painter, painter.action, "image/png", picture)) again(painter);
    }, "image/png");
  });
  follow();
  redraw();
  if (painter.dataset.mask) {
    const image = new Image();
    image.onload = () => {
      base = image;
      redraw();
      board.dataset.ready = "yes";
    };
    image.onerror = () => painter.querySelector("[role=status]").textContent =
      "The mask there is now cannot be read. To save replaces it.";
    image.src = painter.dataset.mask;
  } else board.dataset.ready = "yes";
}

// Saves captions and masks, and undoes that. Without this script nothing can be edited.
"use strict";
const edit = document.getElementById("edit");

async function send(form, path, type, body) {
  const says = form.querySelector("[role=status]");
  says.textContent = "Saving …";
  let message;
  try {
    const answer = await fetch(path, {method: "POST", body, headers: {
      "content-type": type, "x-latentry-edit": edit.dataset.token, "x-latentry-sample": edit.dataset.sample,
      "x-latentry-version": form.dataset.version}});
    message = await answer.text();
    if (answer.ok) {
      sessionStorage.setItem("said", JSON.stringify([form.id, message]));
      form.dataset.changed = "";
      location.reload();
      return;
    }
  } catch {
    message = "No answer: is prep view still running? Nothing was saved.";
  }
  says.textContent = message;
}

if (edit) {
  const [told, said] = JSON.parse(sessionStorage.getItem("said") ?? "[]");
  sessionStorage.removeItem("said");
  for (const form of edit.querySelectorAll("form")) {
    form.hidden = false;
    if (form.id === told) {
      form.querySelector("[role=status]").textContent = said;
      form.querySelector("textarea, canvas").focus();
    }
    form.querySelector(".undo").addEventListener("click", () => send(form, form.dataset.undo, "text/plain", ""));
  }
  addEventListener("beforeunload", event => {
    if (edit.querySelector("form[data-changed=yes]")) event.preventDefault();
  });
}

const captions = document.getElementById("edit-caption");
if (captions) {
  const words = captions.querySelector("textarea");
  captions.addEventListener("submit", event => {
    event.preventDefault();
    send(captions, captions.action, "text/plain;charset=utf-8", words.value);
  });
  words.addEventListener("input", () => captions.dataset.changed = "yes");
  words.addEventListener("keydown", event => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) captions.requestSubmit();
  });
}

// A mask is white where the picture trains. It lies over the picture and darkens what does not train.
const painter = document.getElementById("edit-mask");
if (painter) {
  const board = painter.querySelector("canvas"), mark = painter.querySelector(".cursor");
  const pen = board.getContext("2d"), size = painter.querySelector("[name=size]");
  const strokes = [], at = {x: board.width / 2, y: board.height / 2};
  let base = null, stroke = null;

  const trains = () => painter.elements.tool.value === "trains";
  const width = () => Number(size.value) * Math.max(board.width, board.height) / 100;

  function draw(one) {
    pen.globalCompositeOperation = one.invert ? "difference" : "source-over";
    pen.fillStyle = pen.strokeStyle = one.color;
    if (!one.points) pen.fillRect(0, 0, board.width, board.height);
    else {
      pen.lineCap = pen.lineJoin = "round";
      pen.lineWidth = one.width;
      pen.beginPath();
      for (const [x, y] of one.points) pen.lineTo(x, y);
      if (one.points.length === 1) pen.lineTo(one.points[0][0], one.points[0][1] + 0.01);
      pen.stroke();
    }
  }
  function redraw() {
    draw({color: "#fff"});
    if (base) pen.drawImage(base, 0, 0, board.width, board.height);
    strokes.forEach(draw);
    painter.dataset.changed = strokes.length ? "yes" : "";
    painter.querySelector("[name=back]").disabled = !strokes.length;
  }
  function add(one) {
    strokes.push(one);
    redraw();
  }
  function begin() {
    add(stroke = {color: trains() ? "#fff" : "#000", width: width(), points: [[at.x, at.y]]});
  }
  function move(x, y) {
    at.x = Math.min(Math.max(x, 0), board.width);
    at.y = Math.min(Math.max(y, 0), board.height);
    mark.style.left = `${100 * at.x / board.width}%`;
    mark.style.top = `${100 * at.y / board.height}%`;
    mark.style.width = `${100 * width() / board.width}%`;
    if (stroke) {
      stroke.points.push([at.x, at.y]);
      draw({...stroke, points: stroke.points.slice(-2)});
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
  for (const end of ["pointerup", "pointercancel"]) board.addEventListener(end, () => stroke = null);
  board.addEventListener("keydown", event => {
    const step = Math.max(width() / 2, 1), key = event.key;
    const [x, y] = {ArrowLeft: [-step, 0], ArrowRight: [step, 0], ArrowUp: [0, -step], ArrowDown: [0, step]}[key] ?? [];
    if (x !== undefined) {
      if (event.shiftKey) begin();
      move(at.x + x, at.y + y);
      stroke = null;
    } else if (key === " " || key === "Enter") {
      begin();
      stroke = null;
    } else if (key === "[" || key === "]") {
      size.value = Number(size.value) + (key === "]" ? 1 : -1);
      move(at.x, at.y);
    } else if (key === "x") painter.elements.tool.value = trains() ? "not" : "trains";
    else if (key === "z") painter.querySelector("[name=back]").click();
    else return;
    event.preventDefault();
  });
  size.addEventListener("input", () => move(at.x, at.y));
  painter.querySelector("[name=back]").addEventListener("click", () => {
    strokes.pop();
    redraw();
  });
  painter.querySelector("[name=none]").addEventListener("click", () => add({color: "#000"}));
  painter.querySelector("[name=all]").addEventListener("click", () => add({color: "#fff"}));
  painter.querySelector("[name=invert]").addEventListener("click", () => add({color: "#fff", invert: true}));
  painter.addEventListener("submit", event => {
    event.preventDefault();
    board.toBlob(picture => send(painter, painter.action, "image/png", picture), "image/png");
  });
  move(at.x, at.y);
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

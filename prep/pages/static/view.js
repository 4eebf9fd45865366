// Keys for what the pages can do with links alone: "/" searches, arrows go to neighbors, Escape goes up.
"use strict";
document.addEventListener("keydown", event => {
  if (event.defaultPrevented || event.altKey || event.ctrlKey || event.metaKey || event.shiftKey) return;
  if (event.target.closest("input, select, textarea, button, summary, canvas, .scroll")) return;
  const follow = rel => document.querySelector(`a[rel="${rel}"]`)?.click();
  if (event.key === "ArrowLeft") follow("prev");
  else if (event.key === "ArrowRight") follow("next");
  else if (event.key === "Escape") follow("up");
  else if (event.key === "/" && document.getElementById("q")) {
    event.preventDefault();
    document.getElementById("q").focus();
  }
});

// Empty fields say nothing: they stay out of the address.
document.querySelector("form.filters")?.addEventListener("submit", event => {
  for (const field of event.target.elements) if (field.name && !field.value) field.disabled = true;
});
addEventListener("pageshow", () => {
  for (const field of document.querySelectorAll("form.filters [disabled]")) field.disabled = false;
});

// A slider through the steps of each prompt. Without this script all pictures are side by side.
let films = [];
const chosen = new Map();  // the step of each slider that is not at the newest one
const named = figure => figure.querySelector("figcaption").textContent;

function begun(figure) {
  const frames = [...figure.querySelectorAll("li")], row = document.createElement("p");
  const slider = document.createElement("input"), says = document.createElement("output");
  row.className = "slide";
  Object.assign(slider, {type: "range", min: 0, max: frames.length - 1, value: frames.length - 1});
  slider.setAttribute("aria-label", `Step of ${named(figure)}`);
  row.append(slider, says);
  figure.querySelector(".frames").before(row);
  const film = {figure, frames, slider, says};
  slider.addEventListener("input", () => {
    const number = Number(film.slider.value), step = Number(film.frames[number].dataset.step);
    show(film, number);
    if (document.getElementById("together").checked)
      for (const other of films) if (other !== film) show(other, placeOf(other, step));
  });
  return film;
}

function show(film, number) {
  film.frames.forEach((frame, place) => frame.classList.toggle("now", place === number));
  film.slider.value = number;
  const step = Number(film.frames[number].dataset.step);
  if (number === film.frames.length - 1) chosen.delete(named(film.figure));
  else chosen.set(named(film.figure), step);
  film.says.textContent = `step ${step.toLocaleString("en")}`;
  film.slider.setAttribute("aria-valuetext", film.says.textContent);
}

// The last picture that was there at that step.
const placeOf = (film, step) =>
  Math.max(0, film.frames.filter(frame => Number(frame.dataset.step) <= step).length - 1);

function beginFilms(together = true, beside = false) {
  films = [...document.querySelectorAll(".film")].map(begun);
  if (!films.length) return;
  document.querySelector(".sliders").hidden = false;
  const boxes = {together: document.getElementById("together"), beside: document.getElementById("beside")};
  Object.assign(boxes.together, {checked: together});
  Object.assign(boxes.beside, {checked: beside});
  for (const film of films) {
    const step = chosen.get(named(film.figure));
    show(film, step === undefined ? film.frames.length - 1 : placeOf(film, step));
    film.figure.classList.toggle("live", !beside);
  }
  boxes.beside.addEventListener("change", () => {
    for (const film of films) film.figure.classList.toggle("live", !boxes.beside.checked);
  });
}
beginFilms();

// run.js has exchanged a part of the page; it asks before for what was checked there.
document.addEventListener("exchanging", event => {
  event.detail.together = document.getElementById("together")?.checked ?? true;
  event.detail.beside = document.getElementById("beside")?.checked ?? false;
});
document.addEventListener("exchanged", event => {
  if (event.detail.part.id === "samples") beginFilms(event.detail.together, event.detail.beside);
});

// Commands are copied.
document.addEventListener("click", async event => {
  const button = event.target.closest("button.copy");
  if (!button) return;
  const code = button.previousElementSibling;
  try {
    await navigator.clipboard.writeText(code.textContent);
    button.textContent = "Copied";
  } catch {  // not allowed here: select it for the keyboard
    getSelection().selectAllChildren(code);
    button.textContent = "Selected";
  }
  setTimeout(() => button.textContent = "Copy", 2000);
});

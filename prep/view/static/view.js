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
const films = [...document.querySelectorAll(".film")].map(figure => {
  const frames = [...figure.querySelectorAll("li")], row = document.createElement("p");
  const slider = document.createElement("input"), says = document.createElement("output");
  row.className = "slide";
  Object.assign(slider, {type: "range", min: 0, max: frames.length - 1, value: frames.length - 1});
  slider.setAttribute("aria-label", `Step of ${figure.querySelector("figcaption").textContent}`);
  row.append(slider, says);
  figure.querySelector(".frames").before(row);
  return {figure, frames, slider, says};
});

function show(film, number) {
  film.frames.forEach((frame, place) => frame.classList.toggle("now", place === number));
  film.slider.value = number;
  film.says.textContent = `step ${Number(film.frames[number].dataset.step).toLocaleString("en")}`;
  film.slider.setAttribute("aria-valuetext", film.says.textContent);
}

// The last picture that was there at that step.
const placeOf = (film, step) =>
  Math.max(0, film.frames.filter(frame => Number(frame.dataset.step) <= step).length - 1);

for (const film of films) {
  film.slider.addEventListener("input", () => {
    const number = Number(film.slider.value), step = Number(film.frames[number].dataset.step);
    show(film, number);
    if (document.getElementById("together").checked)
      for (const other of films) if (other !== film) show(other, placeOf(other, step));
  });
  show(film, film.frames.length - 1);
  film.figure.classList.add("live");
}
if (films.length) {
  document.querySelector(".sliders").hidden = false;
  document.getElementById("beside").addEventListener("change", event => {
    for (const film of films) film.figure.classList.toggle("live", !event.target.checked);
  });
}

// Keys for what the pages can do with links alone: "/" searches, arrows go to neighbors, Escape goes up.
"use strict";
document.addEventListener("keydown", event => {
  if (event.defaultPrevented || event.altKey || event.ctrlKey || event.metaKey || event.shiftKey) return;
  if (event.target.closest("input, select, textarea, button, summary, .scroll")) return;
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

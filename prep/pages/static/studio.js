// Keeps the command of a form up to date while it is filled, and copies commands. Loaded after run.js, which sends.
"use strict";
const form = document.getElementById("form");
let pause = 0;

// Puts the filled fields into the address, so that it can be kept, and asks for the command.
function refill() {
  const filled = [...new FormData(form)].filter(([, value]) => value !== "");
  history.replaceState(null, "", `${location.pathname}?${new URLSearchParams(filled.length ? filled : [["", ""]])}`);
  look();
}

form?.addEventListener("submit", event => {
  event.preventDefault();
  refill();
});
form?.addEventListener("input", () => {
  for (const button of document.querySelectorAll("#add, #forecast [data-ask]")) button.disabled = true;
  for (const part of ["command", "forecast"]) sent.delete(part);  // until they are those of the fields,
  turn++;  // which no answer has that is still on its way
  clearTimeout(pause);
  pause = setTimeout(refill, 200);
});

document.addEventListener("click", async event => {
  const button = event.target.closest("[data-copy]");
  if (!button) return;
  await navigator.clipboard.writeText(button.dataset.copy);
  said.textContent = "Copied.";
});

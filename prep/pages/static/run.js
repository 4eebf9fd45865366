// Keeps the page of a run, or of jobs, up to date, and sends what its buttons ask. Without this script the page is as it was loaded.
// Loaded before view.js, which adds sliders: what is compared is what the server sent.
"use strict";
document.documentElement.classList.add("scripted");
const said = document.getElementById("said");
const sent = new Map([...document.querySelectorAll("[data-live]")].map(part => [part.id, part.outerHTML]));
let tag = said.dataset.tag, loaded = performance.now();
let turn = 0, pending = 0;  // the newest look, whose answer alone is taken; looks that have no answer yet

const brief = seconds => {
  for (const [unit, size] of [["d", 86400], ["h", 3600], ["min", 60]])
    if (seconds >= size) return `${Math.floor(seconds / size)} ${unit}`;
  return `${Math.floor(seconds)} s`;
};

// "last step 4 s ago" goes on between answers.
function age() {
  for (const one of document.querySelectorAll("[data-ago]"))
    one.textContent = `${brief(Number(one.dataset.ago) + (performance.now() - loaded) / 1000)} ago`;
}

// What a user has opened, scrolled or focused in a part, by its place there; what has the focus, by its id if it has one.
const OPEN = "details", ROLLED = ".scroll, .frames", FOCUSED = "a, button, input, summary, [tabindex]";
function exchange(old, fresh) {
  const pictures = new Map([...old.querySelectorAll("img")].map(one => [one.getAttribute("src"), one]));
  for (const one of fresh.querySelectorAll("img")) {
    const same = pictures.get(one.getAttribute("src"));
    if (same) one.replaceWith(same);  // it is there already, and does not flicker
    pictures.delete(one.getAttribute("src"));
  }
  const opened = [...old.querySelectorAll(OPEN)].map(one => one.open);
  const rolled = [...old.querySelectorAll(ROLLED)].map(one => [one.scrollLeft, one.scrollTop]);
  const focused = [...old.querySelectorAll(FOCUSED)].indexOf(document.activeElement), id = document.activeElement.id;
  const detail = {part: fresh};
  document.dispatchEvent(new CustomEvent("exchanging", {detail}));
  old.replaceWith(fresh);
  document.dispatchEvent(new CustomEvent("exchanged", {detail}));
  fresh.querySelectorAll(OPEN).forEach((one, place) => one.open = opened[place] ?? one.open);
  fresh.querySelectorAll(ROLLED).forEach((one, place) => one.scrollTo(...(rolled[place] ?? [0, 0])));
  if (focused < 0) return;
  const same = id && fresh.querySelector(`#${CSS.escape(id)}`);
  (same || fresh.querySelectorAll(FOCUSED)[focused])?.focus({preventScroll: true});
}

function take(text) {
  const page = new DOMParser().parseFromString(text, "text/html"), top = scrollY;
  for (const fresh of page.querySelectorAll("[data-live]")) {
    const html = fresh.outerHTML;
    if (sent.get(fresh.id) === html) continue;
    sent.set(fresh.id, html);
    exchange(document.getElementById(fresh.id), document.adoptNode(fresh));
  }
  if (scrollY !== top) scrollTo({top, behavior: "instant"});
  loaded = performance.now();
  age();
}

async function look() {
  const mine = ++turn;
  pending++;
  try {
    const answer = await fetch(location.href, {headers: {"if-none-match": tag}});
    const text = await answer.text();
    if (mine !== turn) return;
    if (answer.status === 200) {
      take(text);
      tag = answer.headers.get("etag");
    } else if (answer.status !== 304) throw new Error(answer.status);
    document.body.classList.remove("lost");
  } catch {
    if (mine !== turn) return;
    document.body.classList.add("lost");
    said.textContent = "No answer: does the program still run? This is how it was.";
    return;
  } finally {
    pending--;
  }
  if (said.textContent.startsWith("No answer")) said.textContent = "";
}

document.addEventListener("click", async event => {
  const button = event.target.closest("[data-ask]");
  if (!button) return;
  const focused = document.activeElement === button;
  button.disabled = true;  // which takes the focus from it
  try {
    const answer = await fetch(button.dataset.ask, {method: "POST", body: "",
                                                    headers: {"x-latentry-edit": said.dataset.token}});
    said.textContent = await answer.text();
    const next = answer.headers.get("x-latentry-next");
    if (next) return location.assign(next);
  } catch {
    said.textContent = "No answer: does the program still run? Nothing was asked.";
  }
  button.disabled = false;
  if (focused && document.activeElement === document.body) button.focus({preventScroll: true});
  look();
});

let seen = performance.now();
setInterval(() => {
  age();
  const every = 1000 * Number(document.getElementById("state").dataset.every);
  if (!every || document.hidden || pending || performance.now() - seen < every) return;
  seen = performance.now();
  look();
}, 1000);

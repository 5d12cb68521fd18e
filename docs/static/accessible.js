// What Sphinx and Furo leave out for screen readers and keyboards: the level of captions, and code that can be scrolled by keys.
addEventListener("DOMContentLoaded", () => {
  for (const caption of document.querySelectorAll('.caption[role="heading"]')) caption.setAttribute("aria-level", "2");
  for (const code of document.querySelectorAll("pre")) code.tabIndex = 0;
  document.querySelector("aside.sidebar-drawer")?.setAttribute("aria-label", "Site");
  document.querySelector("aside.toc-drawer")?.setAttribute("aria-label", "This page");
});

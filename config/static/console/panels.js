// Swaps the dashboard's cards in place. Rests while the tab is hidden; a login page instead of cards means: reload.
(() => {
  const box = document.getElementById("panels");
  if (!box) return;
  const refresh = async () => {
    if (document.hidden || box.contains(document.activeElement)) return;
    try {
      const answer = await fetch(box.dataset.url, { credentials: "same-origin" });
      if (answer.redirected || answer.status === 403) return location.reload();
      if (answer.ok) box.innerHTML = await answer.text();
      box.classList.toggle("sb-stale", !answer.ok);
    } catch {
      box.classList.add("sb-stale");
    }
  };
  setInterval(refresh, Number(box.dataset.seconds) * 1000);
  document.addEventListener("visibilitychange", refresh);
})();

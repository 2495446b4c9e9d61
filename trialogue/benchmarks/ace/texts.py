"""What the tools of ACEBench answer, in both its languages."""

from __future__ import annotations

from typing import Literal

Language = Literal["en", "zh"]

TEXTS: dict[str, tuple[str, str]] = {
    # the phone itself
    "wifi_on": ("Wi-Fi has been turned on", "wifi已经打开"),
    "device_on": ("Device has been logged in", "设备已经登录"),
    # messages
    "send_locked": ("Device not logged in, unable to send message", "device未登录，无法发送短信"),
    "send_offline": ("Wi-Fi is turned off, cannot send messages at this time", "wifi关闭，此时不能发送信息"),
    "inbox_full": (
        "Inbox capacity is full. You need to ask the user which message to delete.",
        "内存容量不够了，你需要询问user删除哪一条短信。",
    ),
    "no_party": ("Sender or receiver does not exist", "发送者或接收者不存在"),
    "sent": ("Message successfully sent to {0}.", "短信成功发送给{0}。"),
    "delete_locked": ("Device not logged in, unable to delete message", "device未登录，无法删除短信"),
    "no_message": ("Message ID does not exist", "短信ID不存在"),
    "deleted": ("Message ID {0} has been successfully deleted.", "短信ID {0} 已成功删除。"),
    "view_locked": (
        "Device not logged in, unable to view message information",
        "device未登录，无法查看短信信息",
    ),
    "no_sender": ("Sender does not exist", "发送者不存在"),
    "no_receiver": ("Receiver does not exist", "接收者不存在"),
    "none_between": ("No related message records found", "没有找到相关的短信记录"),
    "no_user": ("User does not exist", "用户不存在"),
    "none_found": ("No messages found containing the keyword", "没有找到包含关键词的短信"),
    "times_locked": (
        "Device not logged in, unable to retrieve all message times and their corresponding message IDs.",
        "device未登录，获取所有短信的时间以及对应的短信编号。",
    ),
    "latest_locked": (
        "Device not logged in, unable to retrieve the latest sent message ID.",
        "device未登录，无法获取最新发送的短信ID。",
    ),
    "earliest_locked": (
        "Device not logged in, unable to retrieve the earliest sent message ID.",
        "device未登录，无法获取最早发送的短信ID",
    ),
    "inbox_empty": ("No message records found", "短信记录为空"),
    "latest": ("The latest message ID is {0}", "最新的短信ID是 {0}"),
    "earliest": ("The earliest message ID is {0}", "最早的短信ID是 {0}"),
    # reminders
    "reminder_locked": (
        "The device is not logged in, so you cannot view notifications",
        "device未登录，无法查看提醒",
    ),
    "no_title": ("No reminder found with the title '{0}'.", "没有找到标题为 '{0}' 的提醒"),
    "add_locked": (
        "Device not logged in. Unable to add a new reminder.",
        "device未登录，无法添加一个新的提醒",
    ),
    "reminders_full": (
        "Reminder capacity is full. Unable to add a new reminder.",
        "提醒容量已满，无法添加新的提醒",
    ),
    "reminder_added": ("Reminder '{0}' was successfully added.", "提醒 '{0}' 已成功添加"),
    "remove_locked": (
        "Device not logged in. Unable to delete the specified reminder.",
        "device未登录，无法删除指定的提醒",
    ),
    "no_reminder": ("Reminder ID does not exist.", "提醒ID不存在"),
    "reminder_deleted": ("Reminder ID {0} was successfully deleted.", "提醒ID {0} 已成功删除"),
    "no_reminders": ("No reminders found.", "没有任何提醒"),
    "notified": ("", "提醒ID {0} 已标记为已通知"),
    "no_reminder_found": ("", "没有找到包含该关键词的提醒"),
    # food
    "login_offline": ("Wi-Fi is not enabled, unable to login", "wifi未打开，无法登录"),
    "wrong_password": ("Incorrect password", "密码错误"),
    "already_in": ("{0} is already logged in", "{0} 已经登录"),
    "food_in": ("User {0} has successfully logged in!", "用户{0}登陆成功！"),
    "nobody_in": ("No users are currently logged in to the food platform", "当前没有登录food platform"),
    "not_in": ("User {0} is not logged in to the food platform", "用户 {0} 未登录food platform"),
    "no_merchant": ("Merchant does not exist", "商家不存在"),
    "bad_quantity": ("Invalid quantity {0} for product {1}", "无效的数量 {0} 对于商品 {1}"),
    "no_product": ("Product {0} does not exist in {1}'s menu", "商品 {0} 不存在于 {1} 的菜单中"),
    "too_poor": ("Insufficient balance to place the order", "余额不足，无法下单"),
    "ordered": (
        "Food delivery order successfully placed with {0}. Total amount: {1} yuan",
        "外卖订单成功下单给 {0}，总金额为 {1} 元",
    ),
    "no_such_merchant": ("Merchant '{0}' does not exist", "商家 '{0}' 不存在"),
    "no_orders": ("User has no order records", "用户没有订单记录"),
    "no_order_found": ("No matching orders found", "没有找到匹配的订单"),
    # travel
    "no_direct": ("There are no direct flights that meet the criteria.", "没有符合条件的直达航班"),
    "no_transfer": (
        "No connecting flights that meet the criteria were found.",
        "未找到符合条件的中转航班。",
    ),
    "wrong_account": ("Incorrect username or password.", "用户名或密码不正确"),
    "which_reservation": ("Please provide a valid reservation ID or user ID", "请提供有效的预订ID或用户ID"),
    "bad_payment": ("Invalid payment method", "支付方式无效"),
    "cash_short": (
        "Your cash balance is insufficient. Please consider using another payment method.",
        "cash余额不足，请考虑换一种支付方式",
    ),
    "bank_short": (
        "Your bank balance is insufficient. Please consider using another payment method.",
        "bank余额不足，请考虑换一种支付方式",
    ),
    "booked": (
        "Booking successful. Reservation ID: {0}. Total cost: {1} yuan (including baggage fees).",
        "预订成功，预订号：{0}，总费用：{1}元（包含行李费用）。",
    ),
    "not_yours": ("Reservation not found or user ID does not match.", "预订未找到或用户ID不匹配。"),
    "no_flight": ("Flight information not found.", "航班信息未找到。"),
    "flight_changed": ("Flight number has been changed.", "航班号已更改。"),
    "flight_unfit": (
        "Flight change failed: Invalid new flight number or destination does not match.",
        "航班更改失败：新的航班号无效或目的地不匹配。",
    ),
    "cabin_paid": (
        "Cabin change successful. Price difference paid: {0}.",
        "舱位更改成功。已支付差价: {0}。",
    ),
    "cabin_short": (
        "Insufficient balance to pay the cabin price difference.",
        "余额不足，无法支付舱位差价。",
    ),
    "cabin_refunded": (
        "Cabin change successful. Price difference refunded: {0}.",
        "舱位更改成功。已退款差价: {0}。",
    ),
    "baggage_paid": (
        "Baggage has been added. Additional fee to be paid: {0}.",
        "行李已增加。需支付额外费用: {0}。",
    ),
    "baggage_short": (
        "Insufficient balance to pay the additional baggage fees.",
        "余额不足，无法支付额外行李费用。",
    ),
    "changed_free": ("Modification completed with no additional fees.", "修改完成，无需额外费用。"),
    "bad_user": ("Invalid user ID.", "用户ID无效。"),
    "bad_reservation": (
        "Invalid reservation ID or it does not belong to the user.",
        "预订ID无效或与该用户无关。",
    ),
    "bad_flight": ("Invalid flight information.", "航班信息无效。"),
    "departed": ("The flight segment has been used and cannot be canceled.", "航段已使用，无法取消。"),
    "airline_cancelled": ("The airline has canceled the flight.", "航空公司取消航班"),
    "cancelled_by_airline": (
        (
            "The flight has been canceled. Your reservation will be canceled free of charge, "
            "and {0} yuan has been refunded."
        ),
        "航班已取消，您的预订将被免费取消，已退款{0}元。",
    ),
    "cancelled_early": (
        "More than 24 hours before departure. Free cancellation successful, {0} yuan has been refunded.",
        "距离出发时间超过24小时，免费取消成功，已退款{0}元。",
    ),
    "cancelled_late": (
        (
            "Less than 24 hours before departure. A cancellation fee of {0} yuan has been deducted, "
            "and {1} yuan has been refunded."
        ),
        "距离出发时间不足24小时，已扣除取消费{0}元，退款{1}元。",
    ),
    "economy": ("Economy Class", "经济舱"),
    "business": ("Business Class", "商务舱"),
}


def say(language: str, key: str, *values: object) -> str:
    """One answer, with what belongs into it."""
    return TEXTS[key][language == "zh"].format(*values)
